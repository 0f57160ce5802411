// Expert kernels in plain C++, for any processor.

#include "experts.h"

namespace {

using namespace moestro;

inline float from_f16(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t bits = rest >= 0x7c00 ? 0x7f800000u | (rest & 0x3ff) << 13 : (rest << 13) + 0x38000000u;
    float value;
    if (rest < 0x400) {
        value = float(rest) * 5.9604644775390625e-8f;  // 2^-24
        __builtin_memcpy(&bits, &value, 4);
    }
    bits |= sign;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t to_f16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;  // from halfway above the largest on
    if (bits >= 0x38800000) {
        bits -= 0x38000000;
        return sign | uint16_t((bits + 0xfff + (bits >> 13 & 1)) >> 13);
    }
    float small;
    __builtin_memcpy(&small, &bits, 4);
    small += 0.5f;  // whose last place is that of a subnormal half
    __builtin_memcpy(&bits, &small, 4);
    return sign | uint16_t(bits - 0x3f000000);
}

#include "rows.h"

struct Eight {
    float lane[8];
};

template <Kind W>
struct Plain {
    static constexpr int64_t LANES = 8, LINE = 16;
    static constexpr int ACCUMULATORS = 8;
    using Value = float;
    using Sum = Eight;
    using Weights = Eight;
    using Values = Eight;

    static int64_t bytes(int64_t length) { return length * ELEMENT[W]; }
    static Sum zero() { return {}; }

    static Eight weights(const char* row, int64_t k, int64_t count = LANES) {
        Eight out = {};
        row += bytes(k);
        if constexpr (W == F32) {
            __builtin_memcpy(out.lane, row, count * sizeof(float));
        } else {
            uint16_t half[LANES] = {};
            __builtin_memcpy(half, row, count * sizeof(uint16_t));
            for (int i = 0; i < LANES; i++)
                out.lane[i] = W == BF16 ? from_bf16(half[i]) : from_f16(half[i]);
        }
        return out;
    }

    static Eight values(const char* x, int64_t k, int64_t count = LANES) {
        Eight out = {};
        __builtin_memcpy(out.lane, x + k * sizeof(float), count * sizeof(float));
        return out;
    }

    static Sum add(Sum sum, const Eight& weight, const Eight& value) {
        for (int i = 0; i < LANES; i++) sum.lane[i] += weight.lane[i] * value.lane[i];
        return sum;
    }

    static void reduce(const Sum* sums, float* out) {
        for (int i = 0; i < 8; i++) {
            const float* a = sums[i].lane;
            out[i] = ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
        }
    }
};

template <Kind W, Kind X>
constexpr Variant made = Rows<Plain<W>>::template variant<X>("generic");

}  // namespace

namespace moestro {

const Variant* generic_variant(Kind weights, Kind x) {
    if (weights == F32 && x == F32) return &made<F32, F32>;
    if (weights == BF16 && x == BF16) return &made<BF16, BF16>;
    if (weights == F16 && x == F16) return &made<F16, F16>;
    if (weights == BF16 && x == F32) return &made<BF16, F32>;
    if (weights == F16 && x == F32) return &made<F16, F32>;
    return nullptr;
}

}  // namespace moestro
