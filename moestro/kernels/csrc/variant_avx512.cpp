// Expert kernels for AVX-512: everything is multiplied and summed in float32.

#include "experts.h"

#if defined(__x86_64__) && defined(__GNUC__)

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")

#include <immintrin.h>

namespace {

using namespace moestro;

inline float from_f16(uint16_t half) { return _cvtsh_ss(half); }
inline uint16_t to_f16(float value) { return _cvtss_sh(value, 0); }

#include "rows.h"

#include "reduce.h"

template <Kind W>
struct Avx512 {
    static constexpr int64_t LANES = 16, LINE = 64 / ELEMENT[W];
    static constexpr int ACCUMULATORS = 16;
    using Value = float;
    using Sum = __m512;
    using Weights = __m512;
    using Values = __m512;

    static int64_t bytes(int64_t length) { return length * ELEMENT[W]; }
    static Sum zero() { return _mm512_setzero_ps(); }
    static __mmask16 last(int64_t count) { return __mmask16((1u << count) - 1); }

    static __m512 widened(__m256i half) {
        if constexpr (W == F16) return _mm512_cvtph_ps(half);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }

    static __m512 weights(const char* row, int64_t k) {
        row += bytes(k);
        if constexpr (W == F32) return _mm512_loadu_ps(row);
        return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
    }

    static __m512 weights(const char* row, int64_t k, int64_t count) {
        row += bytes(k);
        if constexpr (W == F32) return _mm512_maskz_loadu_ps(last(count), row);
        return widened(_mm256_maskz_loadu_epi16(last(count), row));
    }

    static __m512 values(const char* x, int64_t k) {
        return _mm512_loadu_ps(x + k * sizeof(float));
    }

    static __m512 values(const char* x, int64_t k, int64_t count) {
        return _mm512_maskz_loadu_ps(last(count), x + k * sizeof(float));
    }

    static Sum add(Sum sum, __m512 weight, __m512 value) {
        return _mm512_fmadd_ps(weight, value, sum);
    }

    static void reduce(const Sum* sums, float* out) {
        __m256 half[8];
        for (int i = 0; i < 8; i++)
            half[i] = _mm256_add_ps(_mm512_castps512_ps256(sums[i]),
                                    _mm512_extractf32x8_ps(sums[i], 1));
        reduce_eight(half, out);
    }
};

template <Kind W, Kind X>
constexpr Variant made = Rows<Avx512<W>>::template variant<X>("avx512");

}  // namespace

namespace moestro {

const Variant* avx512_variant(Kind weights, Kind x) {
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
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

const moestro::Variant* moestro::avx512_variant(Kind, Kind) { return nullptr; }

#endif
