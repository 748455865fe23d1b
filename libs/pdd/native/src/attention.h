// Causal grouped-query attention over a paged KV pool, by blocks of keys with a running softmax (Dao et al. 2022,
// Milakov and Gimelshein 2018). Blocks of keys are counted from the sequence's first token: a row's result depends on
// its own context alone, not on how its sequence was cut into steps.
#pragma once

#include <algorithm>

#include "tile.h"

namespace pdd {

constexpr size_t kKeys = 64;        // keys of one block
constexpr size_t kQueryRows = 96;   // about so many (query, head) pairs share a packed block of keys
constexpr float kNoMaximum = -1e30f;

// One layer's keys or values: element (block, offset in block, head, 0) lies at block * block_stride +
// offset * token_stride + head * head_dim.
template <class E>
struct Pages {
    E* base;
    size_t block_stride, token_stride, block_size;
    E* at(const int32_t* blocks, size_t position) const {
        return base + blocks[position / block_size] * block_stride + position % block_size * token_stride;
    }
};

// Sixteen rows of sixteen 32-bit lanes to sixteen columns.
inline void transpose16(__m512i (&rows)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        rows[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        rows[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// Keys as panels of 16 keys over k = head_dim. `keys[i]` is null beyond the context.
template <class E>
void pack_keys(E* panels, const E* const* keys, size_t count, size_t head_dim) {
    constexpr size_t kLanes = 16 * E::kPerLane;  // elements of a vector
    for (size_t p = 0; p * kPanel < count; p++)
        for (size_t i = 0; i < head_dim; i += kLanes) {
            // The second half of a vector is not there if head_dim is an odd multiple of 16 and elements are narrow.
            const __mmask16 lanes = first_lanes((head_dim - i) / E::kPerLane);
            __m512i rows[16];
            for (size_t r = 0; r < 16; r++)
                rows[r] = p * kPanel + r < count ? _mm512_maskz_loadu_epi32(lanes, keys[p * kPanel + r] + i)
                                                 : _mm512_setzero_si512();
            transpose16(rows);
            E* to = panels + p * kPanel * head_dim + i * kPanel;
            for (size_t r = 0; r < 16 && i + r * E::kPerLane < head_dim; r++)
                _mm512_storeu_si512(to + r * 16 * E::kPerLane, rows[r]);
        }
}

// Values as panels of 16 dimensions over k = keys, filled up with zeros to `kKeys` keys.
inline void pack_values(Float32* panels, const Float32* const* values, size_t count, size_t head_dim) {
    for (size_t i = 0; i < kKeys; i++)
        for (size_t d = 0; d < head_dim; d += kPanel)
            store16(panels + d * kKeys + i * kPanel, i < count ? load16(values[i] + d) : _mm512_setzero_ps());
}
inline void pack_values(BFloat16* panels, const BFloat16* const* values, size_t count, size_t head_dim) {
    const auto wide = [&](size_t i, size_t d) {
        return i < count ? _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values[i] + d)))
                         : _mm512_setzero_si512();
    };
    for (size_t i = 0; i < kKeys; i += 2)
        for (size_t d = 0; d < head_dim; d += kPanel)
            _mm512_storeu_si512(panels + d * kKeys + i * kPanel,
                                _mm512_or_si512(wide(i, d), _mm512_slli_epi32(wide(i + 1, d), 16)));
}

// What a thread needs for one tile of queries; `rows` (query, head) pairs at most.
template <class E>
struct AttentionScratch {
    E *queries, *keys, *values, *weights;   // [rows, head_dim], [kKeys x head_dim] twice, [rows, kKeys]
    float *scores, *sums, *maxima, *totals;  // [rows, kKeys], [rows, head_dim], [rows] twice
};

template <class E>
struct QueryTile {
    size_t first_position;       // of the first query, in its sequence
    size_t queries, group;       // queries, and query heads for each of them
    const int32_t* blocks;
    const E* q;                  // first query, first head of the group; the others' heads follow at `stride`
    size_t stride;
    E* out;                      // laid out as `q`
};

// Weigh one row's scores: `visible` of them count. Returns by how much earlier sums shrink.
template <class E>
inline float soften(const float* scores, E* weights, size_t visible, float scale, float& maximum, float& total) {
    __m512 greatest = _mm512_set1_ps(maximum);
    for (size_t i = 0; i < visible; i += 16)
        greatest = _mm512_mask_max_ps(greatest, first_lanes(visible - i), greatest, _mm512_loadu_ps(scores + i));
    const float now = _mm512_reduce_max_ps(greatest);
    const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(now);
    __m512 sum = _mm512_setzero_ps();
    for (size_t i = 0; i < kKeys; i += 16) {
        __m512 weight = _mm512_setzero_ps();
        if (i < visible) {
            const __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + i), shift), factor);
            weight = _mm512_maskz_mov_ps(first_lanes(visible - i), exp2(x));
        }
        sum = _mm512_add_ps(sum, weight);
        store16(weights + i, weight);
    }
    const float shrink = _mm512_cvtss_f32(exp2(_mm512_set1_ps((maximum - now) * scale)));
    total = total * shrink + _mm512_reduce_add_ps(sum);
    maximum = now;
    return shrink;
}

template <class E>
void attend(const QueryTile<E>& tile, const Pages<E>& keys, const Pages<E>& values, size_t head_dim, float scale,
            const AttentionScratch<E>& scratch) {
    const size_t rows = tile.queries * tile.group;
    const size_t context = tile.first_position + tile.queries;
    for (size_t t = 0; t < tile.queries; t++)
        std::memcpy(scratch.queries + t * tile.group * head_dim, tile.q + t * tile.stride,
                    tile.group * head_dim * sizeof(E));
    std::fill_n(scratch.sums, rows * head_dim, 0.0f);
    std::fill_n(scratch.totals, rows, 0.0f);
    std::fill_n(scratch.maxima, rows, kNoMaximum);

    for (size_t start = 0; start < context; start += kKeys) {
        const size_t count = std::min(kKeys, context - start);
        const E *key_rows[kKeys], *value_rows[kKeys];
        for (size_t i = 0; i < count; i++) {
            key_rows[i] = keys.at(tile.blocks, start + i);
            value_rows[i] = values.at(tile.blocks, start + i);
        }
        pack_keys(scratch.keys, key_rows, count, head_dim);
        pack_values(scratch.values, value_rows, count, head_dim);
        const size_t key_panels = (count + kPanel - 1) / kPanel;
        // Queries before this block see none of it.
        const size_t unseen = start > tile.first_position ? (start - tile.first_position) * tile.group : 0;
        each_tile(rows - unseen, [&](size_t offset, size_t height) {
            const size_t first = unseen + offset;
            with_tile(height, key_panels, [&]<int Rows, int Panels>() {
                __m512 products[Rows][Panels] = {};
                multiply<E>(scratch.queries + first * head_dim, head_dim, scratch.keys, head_dim, products);
                for (int r = 0; r < Rows; r++)
                    for (int p = 0; p < Panels; p++)
                        _mm512_storeu_ps(scratch.scores + (first + r) * kKeys + p * kPanel, products[r][p]);
            });
            float shrink[kTileRows];
            for (size_t r = 0; r < height; r++) {
                const size_t row = first + r;
                const size_t position = tile.first_position + row / tile.group;
                shrink[r] = soften(scratch.scores + row * kKeys, scratch.weights + row * kKeys,
                                   std::min(kKeys, position + 1 - start), scale, scratch.maxima[row],
                                   scratch.totals[row]);
            }
            for (size_t d = 0; d < head_dim; d += kTilePanels * kPanel) {
                const size_t width = std::min<size_t>(kTilePanels, (head_dim - d) / kPanel);
                with_tile(height, width, [&]<int Rows, int Panels>() {
                    __m512 sums[Rows][Panels];
                    float* at = scratch.sums + first * head_dim + d;
                    for (int r = 0; r < Rows; r++)
                        for (int p = 0; p < Panels; p++)
                            sums[r][p] = _mm512_mul_ps(_mm512_loadu_ps(at + r * head_dim + p * kPanel),
                                                       _mm512_set1_ps(shrink[r]));
                    multiply<E>(scratch.weights + first * kKeys, kKeys, scratch.values + d * kKeys, kKeys, sums);
                    for (int r = 0; r < Rows; r++)
                        for (int p = 0; p < Panels; p++)
                            _mm512_storeu_ps(at + r * head_dim + p * kPanel, sums[r][p]);
                });
            }
        });
    }
    for (size_t row = 0; row < rows; row++) {
        const __m512 share = _mm512_set1_ps(1.0f / scratch.totals[row]);
        E* to = tile.out + row / tile.group * tile.stride + row % tile.group * head_dim;
        for (size_t d = 0; d < head_dim; d += 16)
            store16(to + d, _mm512_mul_ps(_mm512_loadu_ps(scratch.sums + row * head_dim + d), share));
    }
}

}  // namespace pdd
