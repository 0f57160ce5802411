// Expert kernels for AMX: tiles of 16 weight rows with 16 tokens. Weights are the left operand, read
// as they are stored; activations the right one, packed into panels: panel b has tokens 16 b and
// up, as [length / 32][16 pairs of columns][16 tokens][2] bfloat16. Tokens past the last are zeros.

#include "experts.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && __GNUC__ >= 11

#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")

#include <immintrin.h>

namespace {

using namespace moestro;

inline float from_f16(uint16_t half) { return _cvtsh_ss(half); }
inline uint16_t to_f16(float value) { return _cvtss_sh(value, 0); }

#include "rows.h"

constexpr int64_t COLUMNS = 32;  // of weights, or of a token, in a tile
constexpr int64_t BYTES = TILE * 64;

struct alignas(64) Config {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Products of 16 rows of each of two matrices with one panel, or two: sums[2 * matrix + panel].
template <bool TWO>
inline void tiles(const char* one, const char* other, const Run& run, const char* panel,
                  int64_t ahead, float (*sums)[TILE][TILE]) {
    const int64_t stride = 2 * run.length;
    const char* next = panel + TILE * stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < run.length / COLUMNS; k++) {
        if (ahead)
            for (int64_t m = 0; m < TILE; m++) {
                __builtin_prefetch(one + m * stride + k * 64 + ahead, 0, 2);
                __builtin_prefetch(other + m * stride + k * 64 + ahead, 0, 2);
            }
        _tile_loadd(4, one + k * 64, stride);
        _tile_loadd(6, panel + k * BYTES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, other + k * 64, stride);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (TWO) {
            _tile_loadd(7, next + k * BYTES, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(2, sums[2], 64);
    if constexpr (TWO) {
        _tile_stored(1, sums[1], 64);
        _tile_stored(3, sums[3], 64);
    }
}

// All panels of the run, two at a time; done(first token, sums of `one`, sums of `other`).
template <class Done>
inline void panels(const char* one, const char* other, const char* x, const Run& run, int64_t ahead,
                   Done done) {
    alignas(64) float sums[4][TILE][TILE];
    for (int64_t t = 0; t < run.tokens; t += 2 * TILE) {
        const char* panel = x + t * 2 * run.length;
        const bool two = t + TILE < run.tokens;
        if (two)
            tiles<true>(one, other, run, panel, t ? 0 : ahead, sums);
        else
            tiles<false>(one, other, run, panel, t ? 0 : ahead, sums);
        done(t, sums[0], sums[2]);
        if (two) done(t + TILE, sums[1], sums[3]);
    }
}

void gated_tiles(const Run& run, const char* const* x, char* const*) {
    const Config config;
    const int64_t stride = 2 * run.length;
    _tile_loadconfig(&config);
    for (int64_t lo = 0; lo < run.rows; lo += TILE) {
        const bool last = lo + TILE >= run.rows;
        const int64_t ahead = !last ? TILE * stride : run.ahead ? run.ahead - lo * stride : 0;
        panels(run.weights + lo * stride, run.second + lo * stride, x[0], run, ahead,
               [&](int64_t token, const float (*gate)[TILE], const float (*up)[TILE]) {
                   const int64_t column = run.first + lo;
                   char* at = run.panel + token * 2 * run.width + column / COLUMNS * BYTES +
                              column % COLUMNS / 2 * 64;
                   for (int64_t m = 0; m < TILE; m += 2) {
                       uint32_t pairs[TILE];
                       for (int64_t t = 0; t < TILE; t++) {
                           const float g = gate[m][t], h = gate[m + 1][t];
                           const float a = g / (1.0f + exponential(-g)) * up[m][t];
                           const float b = h / (1.0f + exponential(-h)) * up[m + 1][t];
                           pairs[t] = to_bf16(a) | uint32_t(to_bf16(b)) << 16;
                       }
                       __builtin_memcpy(at + m / 2 * 64, pairs, 64);
                   }
               });
    }
    _tile_release();
}

void plain_tiles(const Run& run, const char* const* x, char* const* out) {
    const Config config;
    const int64_t stride = 2 * run.length;
    _tile_loadconfig(&config);
    for (int64_t lo = 0; lo < run.rows; lo += 2 * TILE) {
        const bool both = lo + TILE < run.rows, last = lo + 2 * TILE >= run.rows;
        const int64_t ahead = !last ? 2 * TILE * stride : run.ahead ? run.ahead - lo * stride : 0;
        const char* one = run.weights + lo * stride;
        panels(one, both ? one + TILE * stride : one, x[0], run, ahead,
               [&](int64_t token, const float (*first)[TILE], const float (*second)[TILE]) {
                   const int64_t left = run.tokens - token, count = left < TILE ? left : TILE;
                   for (int64_t t = 0; t < count; t++) {
                       uint16_t line[2 * TILE];
                       for (int64_t m = 0; m < TILE; m++) {
                           line[m] = to_bf16(first[m][t]);
                           line[TILE + m] = to_bf16(second[m][t]);
                       }
                       __builtin_memcpy(out[token + t] + 2 * lo, line, both ? 4 * TILE : 2 * TILE);
                   }
               });
    }
    _tile_release();
}

// Linux gives a process its tiles only when asked.
bool granted() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;
    static const bool yes = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return yes;
}

Variant with_tiles(const Variant& rows) {
    Variant both = rows;
    both.name = "amx-bf16";
    both.gated_tiles = gated_tiles;
    both.plain_tiles = plain_tiles;
    return both;
}

}  // namespace

const moestro::Variant* moestro::amx_variant(Kind weights, Kind x) {
    const Variant* rows = avx512_bf16_variant(weights, x);
    if (!rows || !__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-bf16") ||
        !granted())
        return nullptr;
    static const Variant both = with_tiles(*rows);
    return &both;
}

#else

const moestro::Variant* moestro::amx_variant(Kind, Kind) { return nullptr; }

#endif
