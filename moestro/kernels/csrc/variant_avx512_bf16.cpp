// Expert kernels for AVX-512 with bfloat16 products: 32 weights a step, sums in float32. The
// instruction takes subnormal bfloat16 numbers as zero, which no weight is large enough to show.

#include "experts.h"

#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 10

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")

#include <immintrin.h>

namespace {

using namespace moestro;

inline float from_f16(uint16_t half) { return _cvtsh_ss(half); }
inline uint16_t to_f16(float value) { return _cvtss_sh(value, 0); }

#include "rows.h"

#include "reduce.h"

struct Avx512Bf16 {
    static constexpr int64_t LANES = 32, LINE = 32;
    static constexpr int ACCUMULATORS = 16;
    using Value = uint16_t;
    using Sum = __m512;
    using Weights = __m512i;
    using Values = __m512i;

    static int64_t bytes(int64_t length) { return length * 2; }
    static Sum zero() { return _mm512_setzero_ps(); }
    static __m512i weights(const char* row, int64_t k) { return _mm512_loadu_si512(row + 2 * k); }
    static __m512i weights(const char* row, int64_t k, int64_t count) {
        return _mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << count) - 1), row + 2 * k);
    }
    static __m512i values(const char* x, int64_t k) { return weights(x, k); }
    static __m512i values(const char* x, int64_t k, int64_t count) { return weights(x, k, count); }

    static Sum add(Sum sum, __m512i weight, __m512i value) {
        return _mm512_dpbf16_ps(sum, (__m512bh)weight, (__m512bh)value);
    }

    static void reduce(const Sum* sums, float* out) {
        __m256 half[8];
        for (int i = 0; i < 8; i++)
            half[i] = _mm256_add_ps(_mm512_castps512_ps256(sums[i]),
                                    _mm512_extractf32x8_ps(sums[i], 1));
        reduce_eight(half, out);
    }
};

constexpr Variant made = Rows<Avx512Bf16>::variant<BF16>("avx512-bf16");

}  // namespace

const moestro::Variant* moestro::avx512_bf16_variant(Kind weights, Kind x) {
    if (weights != BF16 || x != BF16 || !__builtin_cpu_supports("avx512bf16")) return nullptr;
    return avx512_variant(weights, x) ? &made : nullptr;
}

#else

const moestro::Variant* moestro::avx512_bf16_variant(Kind, Kind) { return nullptr; }

#endif
