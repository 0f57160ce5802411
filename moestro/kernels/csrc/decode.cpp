// A decode step's attention on a CPU, in float32: one query a sequence, straight from KV blocks. A
// plain C interface, called without the interpreter's lock; no state. Meaning: kernels/reference.py.
// Whoever calls asks moestro_native_runs first.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

// After the headers: their members are generated without it, and GCC 13 refuses to mix the two.
#pragma GCC target("avx2,fma")

namespace {

constexpr int64_t CHUNK = 64;  // tokens whose scores are kept before their values are read
constexpr int64_t LANES = 8;   // floats in a vector register
constexpr int64_t AHEAD = 16;  // tokens whose keys and values are asked for beforehand
constexpr int64_t LINE = 16;   // floats in a line of the caches
constexpr int64_t ROWS = 4;    // keys that one pass of a dot product serves

struct Shape {
    int64_t heads, kv_heads, dim, block_size;
    float scale;
};

// The four sums of the lanes of a, b, c, d.
inline __m128 sums(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// The products of one vector with four others.
inline __m128 dots(const float* one, const float* const* four, int64_t length) {
    __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + LANES <= length; i += LANES) {
        const __m256 x = _mm256_loadu_ps(one + i);
        a = _mm256_fmadd_ps(x, _mm256_loadu_ps(four[0] + i), a);
        b = _mm256_fmadd_ps(x, _mm256_loadu_ps(four[1] + i), b);
        c = _mm256_fmadd_ps(x, _mm256_loadu_ps(four[2] + i), c);
        d = _mm256_fmadd_ps(x, _mm256_loadu_ps(four[3] + i), d);
    }
    __m128 sum = sums(a, b, c, d);
    for (; i < length; i++)
        sum = _mm_add_ps(sum, _mm_mul_ps(_mm_set1_ps(one[i]), _mm_setr_ps(four[0][i], four[1][i],
                                                                        four[2][i], four[3][i])));
    return sum;
}

// Where the keys of `count` tokens from `token` on are, their values `kv_heads * dim` further. Past
// `last` it repeats the last one.
inline void places(const Shape& s, const float* rows, const int64_t* table, int64_t layer,
                   int64_t token, int64_t last, int64_t count, const float** at) {
    const int64_t floats = 2 * s.kv_heads * s.dim;
    int64_t block = token / s.block_size, offset = token % s.block_size;
    for (int64_t t = 0; t < count; t++) {
        at[t] = rows + ((table[block] + layer) * s.block_size + offset) * floats;
        if (token + t >= last) continue;
        if (++offset == s.block_size) offset = 0, block++;
    }
}

// Attention of one row over tokens [first, last] of its blocks. `acc` [heads, dim], `top` and
// `sum` [heads] are the running state of a softmax that never sees all scores at once.
void attend(const Shape& s, const float* q, const float* rows, const int64_t* table, int64_t layer,
            int64_t first, int64_t last, float* acc, float* top, float* sum, float* scores) {
    const int64_t share = s.heads / s.kv_heads, width = s.kv_heads * s.dim;
    const float* at[CHUNK + AHEAD];
    for (int64_t lo = first; lo <= last; lo += CHUNK) {
        const int64_t n = std::min(CHUNK, last + 1 - lo);
        places(s, rows, table, layer, lo, last, CHUNK + AHEAD, at);
        for (int64_t t = 0; t < n; t += ROWS) {
            // Blocks lie anywhere, so the processor does not foresee what comes next.
            for (int64_t r = 0; r < ROWS; r++)
                for (int64_t i = 0; i < 2 * width; i += LINE)
                    _mm_prefetch(at[t + AHEAD + r] + i, _MM_HINT_T0);
            for (int64_t h = 0; h < s.heads; h++) {
                const int64_t shift = h / share * s.dim;
                const float* keys[ROWS] = {at[t] + shift, at[t + 1] + shift, at[t + 2] + shift,
                                           at[t + 3] + shift};
                const __m128 dot = dots(q + h * s.dim, keys, s.dim);
                _mm_storeu_ps(scores + h * CHUNK + t, _mm_mul_ps(dot, _mm_set1_ps(s.scale)));
            }
        }
        for (int64_t h = 0; h < s.heads; h++) {
            float *line = scores + h * CHUNK, most = top[h], total = 0;
            for (int64_t t = 0; t < n; t++) most = std::max(most, line[t]);
            const float fade = std::exp(top[h] - most);
            for (int64_t t = 0; t < n; t++) line[t] = std::exp(line[t] - most);
            for (int64_t t = 0; t < n; t++) total += line[t];
            top[h] = most;
            sum[h] = sum[h] * fade + total;
            float* out = acc + h * s.dim;
            for (int64_t i = 0; i < s.dim; i++) out[i] *= fade;
            const int64_t shift = width + h / share * s.dim;
            int64_t i = 0;
            for (; i + 4 * LANES <= s.dim; i += 4 * LANES) {
                __m256 a = _mm256_loadu_ps(out + i), b = _mm256_loadu_ps(out + i + 8),
                       c = _mm256_loadu_ps(out + i + 16), d = _mm256_loadu_ps(out + i + 24);
                for (int64_t t = 0; t < n; t++) {
                    const float* v = at[t] + shift + i;
                    const __m256 p = _mm256_set1_ps(line[t]);
                    a = _mm256_fmadd_ps(p, _mm256_loadu_ps(v), a);
                    b = _mm256_fmadd_ps(p, _mm256_loadu_ps(v + 8), b);
                    c = _mm256_fmadd_ps(p, _mm256_loadu_ps(v + 16), c);
                    d = _mm256_fmadd_ps(p, _mm256_loadu_ps(v + 24), d);
                }
                _mm256_storeu_ps(out + i, a), _mm256_storeu_ps(out + i + 8, b);
                _mm256_storeu_ps(out + i + 16, c), _mm256_storeu_ps(out + i + 24, d);
            }
            for (; i < s.dim; i++)
                for (int64_t t = 0; t < n; t++) out[i] += line[t] * at[t][shift + i];
        }
    }
}

}  // namespace

extern "C" {

// Whether this processor has the instructions that everything here is compiled to.
int moestro_native_runs() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

// q [batch, heads, dim]; rows is the KV pool as [blocks * layers, block_size, 2, kv_heads, dim];
// table [batch, width] has rows of layer 0; first and last [batch] are the tokens seen, both
// included. out [batch, heads * dim]. `threads` at most.
void moestro_decode_attention(const float* q, const float* rows, const int64_t* table,
                              const int64_t* first, const int64_t* last, float* out,
                              int64_t batch, int64_t width, int64_t layer, int64_t heads,
                              int64_t kv_heads, int64_t dim, int64_t block_size, float scale,
                              int threads) {
    const Shape shape{heads, kv_heads, dim, block_size, scale};
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && batch > 1)
    for (int64_t b = 0; b < batch; b++) {
        std::vector<float> state(heads * (dim + 2 + CHUNK), 0.0f);
        float *acc = state.data(), *top = acc + heads * dim, *sum = top + heads;
        std::fill(top, top + heads, -std::numeric_limits<float>::max());
        attend(shape, q + b * heads * dim, rows, table + b * width, layer, first[b], last[b], acc,
               top, sum, sum + heads);
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < dim; i++)
                out[(b * heads + h) * dim + i] = acc[h * dim + i] / sum[h];
    }
}
}
