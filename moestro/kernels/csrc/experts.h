// What the parts of the expert kernels tell each other. No behaviour.

#pragma once

#include <cstdint>

namespace moestro {

enum Kind { F32 = 0, BF16 = 1, F16 = 2 };  // of stored numbers; Python has the same numbers

constexpr int64_t ELEMENT[] = {4, 2, 2};  // bytes
constexpr int64_t SLAB = 64;              // tokens that one call of a kernel serves at most
constexpr int64_t TILE = 16;              // tokens in a panel of the tile kernel

// A run of rows of one expert's matrix, or of two matrices row by row, for some of its tokens.
struct Run {
    const char* weights;   // the run's first row
    const char* second;    // the same row of `up`, when `weights` is of `gate`
    int64_t rows;          // of the run
    int64_t length;        // elements in a row
    int64_t ahead;         // bytes from these weights to those that come next; 0: unknown
    int64_t tokens;        // SLAB at most
    char* panel;           // tiles, gated: the panel of intermediate values
    int64_t first;         // tiles, gated: the run's first row, as a column of that panel
    int64_t width;         // tiles, gated: columns of that panel
};

// x: each token's values; for tiles x[0] is the first panel. out: where each token's result for the
// run's first row goes.
using Kernel = void (*)(const Run&, const char* const* x, char* const* out);

// One way to compute, for one kind of weights and activations.
struct Variant {
    const char* name;
    bool wide;       // its kernels take activations as float32, else as they are
    Kernel gated;    // out = round(silu(weights x) * (second x)), in what the kernels take
    Kernel plain;    // out = round(weights x), as activations are stored
    void (*widen)(const char* x, int64_t count, float* out);
    // For experts with many tokens, from panels of TILE tokens; null where there is none.
    Kernel gated_tiles, plain_tiles;
};

// The variants of one instruction set; null when it is not compiled in or cannot run here.
const Variant* generic_variant(Kind weights, Kind x);
const Variant* avx2_variant(Kind weights, Kind x);
const Variant* avx512_variant(Kind weights, Kind x);
const Variant* avx512_bf16_variant(Kind weights, Kind x);
const Variant* amx_variant(Kind weights, Kind x);

}  // namespace moestro
