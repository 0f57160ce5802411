// Products of a few rows of a matrix with a few tokens, for any vector unit. Each variant includes
// this inside an unnamed namespace, after saying what it compiles for: nothing here may be shared
// between them.
//
// A format F says how a step of LANES weights is read and multiplied:
//   LANES, LINE, ACCUMULATORS    elements of a step, elements of a row asked for at once (a
//                                multiple of LANES), sums that fit in registers (8 or 16)
//   Sum, Weights, Values         vectors
//   bytes(length)                of a stored row
//   weights(row, k), weights(row, k, n)   LANES weights from k on; the last n, zeros after them
//   values(x, k), values(x, k, n)         the same of a token
//   add(sum, weights, values), zero(), reduce(eight sums, eight floats)
//   Value                        what activations are here: float, or uint16_t for bfloat16
// Every sum has one order of its own, whatever is computed beside it.

constexpr int BLOCK = 8;  // weight rows that go together

inline float exponential(float x) {
    // 2^n e^r, |r| <= ln 2 / 2, polynomial of Cephes' expf; NaN stays NaN.
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float magic = 12582912.0f;  // rounds to an integer in the low bits
    const float shifted = x * 1.44269504f + magic, n = shifted - magic;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;
    __builtin_memcpy(&bits, &shifted, 4);
    bits = (bits << 23) + 0x3f800000u;
    float scale;
    __builtin_memcpy(&scale, &bits, 4);
    return p * scale;
}

inline uint16_t to_bf16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return value == value ? uint16_t(rounded) : uint16_t(0x7fc0);
}

inline float from_bf16(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

// out[i] = value[i * STEP], rounded to activations of kind X, as it is stored.
template <Kind X, int STEP>
inline void store(const float* value, int64_t count, char* out) {
    for (int64_t i = 0; i < count; i++) {
        const float one = value[i * STEP];
        if constexpr (X == F32) {
            __builtin_memcpy(out + i * 4, &one, 4);
        } else {
            const uint16_t half = X == BF16 ? to_bf16(one) : to_f16(one);
            __builtin_memcpy(out + i * 2, &half, 2);
        }
    }
}

// The same, as the kernels take it: rounded, but float32 where Value is float.
template <Kind X, class Value, int STEP>
inline void store_inner(const float* value, int64_t count, char* out) {
    if constexpr (X == F32 || sizeof(Value) == 2) {
        store<X, STEP>(value, count, out);
    } else {
        for (int64_t i = 0; i < count; i++) {
            const float one = value[i * STEP];
            const float rounded = X == BF16 ? from_bf16(to_bf16(one)) : from_f16(to_f16(one));
            __builtin_memcpy(out + i * 4, &rounded, 4);
        }
    }
}

template <int N>
struct Number {
    static constexpr int value = N;
};

template <class F>
struct Rows {
    // sums [M][T] of M rows and T tokens. What lies `ahead` of the rows is asked for meanwhile.
    template <int M, int T>
    static inline void tile(const char* const* rows, const char* const* x, int64_t length,
                            int64_t ahead, float* sums) {
        typename F::Sum sum[M * T];
#pragma GCC unroll 16
        for (int i = 0; i < M * T; i++) sum[i] = F::zero();
        const auto step = [&](int64_t at) __attribute__((always_inline)) {
            typename F::Values value[T];
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) value[t] = F::values(x[t], at);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                const typename F::Weights weight = F::weights(rows[m], at);
#pragma GCC unroll 4
                for (int t = 0; t < T; t++) sum[m * T + t] = F::add(sum[m * T + t], weight, value[t]);
            }
        };
        int64_t k = 0;
        for (; k + F::LINE <= length; k += F::LINE) {
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) __builtin_prefetch(rows[m] + F::bytes(k) + ahead, 0, 2);
#pragma GCC unroll 8
            for (int64_t at = 0; at < F::LINE; at += F::LANES) step(k + at);
        }
        for (; k + F::LANES <= length; k += F::LANES) step(k);
        if (k < length) {
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                const typename F::Weights weight = F::weights(rows[m], k, length - k);
#pragma GCC unroll 4
                for (int t = 0; t < T; t++)
                    sum[m * T + t] =
                        F::add(sum[m * T + t], weight, F::values(x[t], k, length - k));
            }
        }
#pragma GCC unroll 2
        for (int i = 0; i < M * T; i += 8) F::reduce(sum + i, sums + i);
    }

    // sums [BLOCK][T] of all rows of a block and T tokens from `token` on.
    template <int T>
    static inline void tiles(const char* const* rows, const char* const* x, const Run& run,
                             int64_t token, float* sums) {
        constexpr int M = F::ACCUMULATORS / T < BLOCK ? F::ACCUMULATORS / T : BLOCK;
        const int64_t ahead = token == 0 ? run.ahead : 0;
        for (int m = 0; m < BLOCK; m += M)
            tile<M, T>(rows + m, x + token, run.length, ahead, sums + m * T);
    }

    // Tokens go by four, then two, then one: each(how many, the first, where their sums are).
    template <class Each>
    static inline void groups(int64_t tokens, float* sums, Each each) {
        int64_t t = 0;
        for (; t + 4 <= tokens; t += 4) each(Number<4>(), t, sums + t * BLOCK);
        for (; t + 2 <= tokens; t += 2) each(Number<2>(), t, sums + t * BLOCK);
        for (; t < tokens; t++) each(Number<1>(), t, sums + t * BLOCK);
    }

    // The rows of a block with all tokens.
    __attribute__((noinline)) static void products(const char* const* rows, const char* const* x,
                                                   const Run& run, float* sums) {
        groups(run.tokens, sums, [&](auto number, int64_t token, float* at) {
            tiles<number.value>(rows, x, run, token, at);
        });
    }

    template <Kind X>
    static void gated(const Run& run, const char* const* x, char* const* out) {
        using Value = typename F::Value;
        constexpr int HALF = BLOCK / 2;
        const int64_t stride = F::bytes(run.length);
        float sums[SLAB * BLOCK];
        for (int64_t lo = 0; lo < run.rows; lo += HALF) {
            const int64_t count = run.rows - lo < HALF ? run.rows - lo : HALF;
            const char* rows[BLOCK];
            for (int64_t m = 0; m < HALF; m++) {
                const int64_t row = lo + (m < count ? m : count - 1);
                rows[m] = run.weights + row * stride;
                rows[HALF + m] = run.second + row * stride;
            }
            products(rows, x, part(run, lo, HALF, stride), sums);
            groups(run.tokens, sums, [&](auto number, int64_t token, const float* gate) {
                constexpr int T = number.value;
                const float* up = gate + HALF * T;
                float inner[HALF * T];
                for (int i = 0; i < HALF * T; i++)
                    inner[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
                for (int t = 0; t < T; t++)
                    store_inner<X, Value, T>(inner + t, count,
                                             out[token + t] + lo * sizeof(Value));
            });
        }
    }

    template <Kind X>
    static void plain(const Run& run, const char* const* x, char* const* out) {
        const int64_t stride = F::bytes(run.length);
        float sums[SLAB * BLOCK];
        for (int64_t lo = 0; lo < run.rows; lo += BLOCK) {
            const int64_t count = run.rows - lo < BLOCK ? run.rows - lo : BLOCK;
            const char* rows[BLOCK];
            for (int64_t m = 0; m < BLOCK; m++)
                rows[m] = run.weights + (lo + (m < count ? m : count - 1)) * stride;
            products(rows, x, part(run, lo, BLOCK, stride), sums);
            groups(run.tokens, sums, [&](auto number, int64_t token, const float* result) {
                constexpr int T = number.value;
                for (int t = 0; t < T; t++)
                    store<X, T>(result + t, count, out[token + t] + lo * ELEMENT[X]);
            });
        }
    }

    // The run with `ahead` from a block of `rows` on: the next block, or what follows the run.
    static inline Run part(const Run& run, int64_t lo, int64_t rows, int64_t stride) {
        Run block = run;
        if (lo + rows < run.rows)
            block.ahead = rows * stride;
        else if (run.ahead)
            block.ahead = run.ahead - lo * stride;
        return block;
    }

    template <Kind X>
    static void widen(const char* x, int64_t count, float* out) {
        if constexpr (X == F32) {
            __builtin_memcpy(out, x, count * sizeof(float));
        } else {
            const uint16_t* half = reinterpret_cast<const uint16_t*>(x);
            for (int64_t i = 0; i < count; i++)
                out[i] = X == BF16 ? from_bf16(half[i]) : from_f16(half[i]);
        }
    }

    template <Kind X>
    static constexpr Variant variant(const char* name) {
        return {name, sizeof(typename F::Value) == 4, gated<X>, plain<X>, widen<X>, nullptr,
                nullptr};
    }
};
