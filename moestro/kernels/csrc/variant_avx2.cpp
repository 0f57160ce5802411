// Expert kernels for AVX2, FMA and F16C: everything is multiplied and summed in float32.

#include "experts.h"

#if defined(__x86_64__) && defined(__GNUC__)

#pragma GCC target("avx2,fma,f16c")

#include <immintrin.h>

namespace {

using namespace moestro;

inline float from_f16(uint16_t half) { return _cvtsh_ss(half); }
inline uint16_t to_f16(float value) { return _cvtss_sh(value, 0); }

#include "rows.h"

#include "reduce.h"

template <Kind W>
struct Avx2 {
    static constexpr int64_t LANES = 8, LINE = 64 / ELEMENT[W];
    static constexpr int ACCUMULATORS = 8;
    using Value = float;
    using Sum = __m256;
    using Weights = __m256;
    using Values = __m256;

    static int64_t bytes(int64_t length) { return length * ELEMENT[W]; }
    static Sum zero() { return _mm256_setzero_ps(); }

    static __m256 widened(__m128i half) {
        if constexpr (W == F16) return _mm256_cvtph_ps(half);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }

    static __m256 weights(const char* row, int64_t k) {
        row += bytes(k);
        if constexpr (W == F32) return _mm256_loadu_ps(reinterpret_cast<const float*>(row));
        return widened(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
    }

    static __m256 weights(const char* row, int64_t k, int64_t count) {
        char padded[LANES * ELEMENT[W]] = {};
        __builtin_memcpy(padded, row + bytes(k), bytes(count));
        return weights(padded, 0);
    }

    static __m256 values(const char* x, int64_t k) {
        __m256 value = _mm256_loadu_ps(reinterpret_cast<const float*>(x) + k);
        asm("" : "+x"(value));  // loaded once, not again for each row
        return value;
    }

    static __m256 values(const char* x, int64_t k, int64_t count) {
        char padded[LANES * sizeof(float)] = {};
        __builtin_memcpy(padded, x + k * sizeof(float), count * sizeof(float));
        return values(padded, 0);
    }

    static Sum add(Sum sum, __m256 weight, __m256 value) {
        return _mm256_fmadd_ps(weight, value, sum);
    }

    static void reduce(const Sum* sums, float* out) { reduce_eight(sums, out); }
};

template <Kind W, Kind X>
constexpr Variant made = Rows<Avx2<W>>::template variant<X>("avx2");

}  // namespace

namespace moestro {

const Variant* avx2_variant(Kind weights, Kind x) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return nullptr;
    if (weights == F32 && x == F32) return &made<F32, F32>;
    if (weights == BF16 && x == BF16) return &made<BF16, BF16>;
    if (weights == F16 && x == F16) return &made<F16, F16>;
    if (weights == BF16 && x == F32) return &made<BF16, F32>;
    if (weights == F16 && x == F32) return &made<F16, F32>;
    return nullptr;
}

}  // namespace moestro

#else

const moestro::Variant* moestro::avx2_variant(Kind, Kind) { return nullptr; }

#endif
