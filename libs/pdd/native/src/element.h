// What a kernel must know of the two types that weights, activations and KV come in. Sums are float in both.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pdd {

struct Float32 {
    float value;
    static constexpr size_t kPerLane = 1;  // elements of one 32-bit lane
    // c + a * b, lane by lane.
    static __m512 multiply_add(__m512 c, __m512i a, __m512i b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), c);
    }
};

struct BFloat16 {
    uint16_t value;
    static constexpr size_t kPerLane = 2;
    // c + a[0] * b[0] + a[1] * b[1], lane by lane.
    static __m512 multiply_add(__m512 c, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
    }
};

inline __mmask16 first_lanes(size_t count) { return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }

// Sixteen values to and from memory, rounded to nearest even on the way in.
inline void store16(Float32* to, __m512 values) { _mm512_storeu_ps(&to->value, values); }
inline void store16(BFloat16* to, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(values));
}
inline __m512 load16(const Float32* from) { return _mm512_loadu_ps(&from->value); }
inline __m512 load16(const BFloat16* from) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline float to_float(Float32 x) { return x.value; }
inline float to_float(BFloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// 2^x for x <= 127: Taylor's series of degree 7 around the nearest integer, relative error below 1e-7. Below -200 it is 0.
inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-200.0f));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.5252734e-5f);
    for (const float c : {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, whole);
}

constexpr float kLog2E = 1.44269504f;

}  // namespace pdd
