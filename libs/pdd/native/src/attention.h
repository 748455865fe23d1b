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

    // Call `work(i, memory of position first + i)` for `count` positions.
    template <class Work>
    void each(const int32_t* blocks, size_t first, size_t count, const Work& work) const {
        size_t page = first / block_size, offset = first % block_size;
        for (size_t i = 0; i < count; page++, offset = 0) {
            E* at = base + blocks[page] * block_stride + offset * token_stride;
            for (; offset < block_size && i < count; offset++, at += token_stride) work(i++, at);
        }
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

// `count` keys, `stride` apart, as panels of 16 keys over k = head_dim.
template <class E>
void pack_keys(E* panels, const E* keys, size_t stride, size_t count, size_t head_dim) {
    constexpr size_t kLanes = 16 * E::kPerLane;  // elements of a vector
    for (size_t p = 0; p * kPanel < count; p++)
        for (size_t i = 0; i < head_dim; i += kLanes) {
            // The second half of a vector is not there if head_dim is an odd multiple of 16 and elements are narrow.
            const __mmask16 lanes = first_lanes((head_dim - i) / E::kPerLane);
            __m512i rows[16];
            for (size_t r = 0; r < 16; r++)
                rows[r] = p * kPanel + r < count ? _mm512_maskz_loadu_epi32(lanes, keys + (p * kPanel + r) * stride + i)
                                                 : _mm512_setzero_si512();
            transpose16(rows);
            E* to = panels + p * kPanel * head_dim + i * kPanel;
            for (size_t r = 0; r < 16 && i + r * E::kPerLane < head_dim; r++)
                _mm512_storeu_si512(to + r * 16 * E::kPerLane, rows[r]);
        }
}

// `count` values, `stride` apart, as panels of 16 dimensions over k = keys, filled up with zeros.
inline void pack_values(Float32* panels, const Float32* values, size_t stride, size_t count,
                        size_t head_dim) {
    for (size_t i = 0; i < kKeys; i++)
        for (size_t d = 0; d < head_dim; d += kPanel)
            store16(panels + d * kKeys + i * kPanel, i < count ? load16(values + i * stride + d) : _mm512_setzero_ps());
}
inline void pack_values(BFloat16* panels, const BFloat16* values, size_t stride, size_t count,
                        size_t head_dim) {
    const auto wide = [&](size_t i, size_t d) {
        return i < count ? _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i * stride + d)))
                         : _mm512_setzero_si512();
    };
    for (size_t i = 0; i < kKeys; i += 2)
        for (size_t d = 0; d < head_dim; d += kPanel)
            _mm512_storeu_si512(panels + d * kKeys + i * kPanel,
                                _mm512_or_si512(wide(i, d), _mm512_slli_epi32(wide(i + 1, d), 16)));
}

// What a thread needs for one tile of queries: `rows` (query, head) pairs of each of `heads` KV heads.
template <class E>
struct AttentionScratch {
    E *key_rows, *value_rows;                // [kKeys, heads, head_dim] twice
    E *queries, *keys, *values, *weights;    // [heads, rows, head_dim], [kKeys x head_dim] twice, [rows, kKeys]
    float *scores, *sums, *maxima, *totals;  // [rows, kKeys], [heads, rows, head_dim], [heads, rows] twice
};

// Some queries of one sequence, and the KV heads they are to be answered from.
template <class E>
struct QueryTile {
    size_t first_position;    // of the first query, in its sequence
    size_t queries, group;    // queries, and query heads of each KV head
    size_t first_head, heads;  // KV heads
    const int32_t* blocks;
    const E* q;               // first query, first of all heads; the next query's follow at `stride`
    E* out;                   // laid out as `q`
    size_t stride;
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

// One block's rows out of their pages, in the order in which they lie in memory: there the hardware reads ahead.
template <class E>
inline void gather(E* to, const Pages<E>& pages, const QueryTile<E>& tile, size_t start, size_t count,
                   size_t head_dim) {
    const size_t size = tile.heads * head_dim;
    pages.each(tile.blocks, start, count, [&](size_t i, const E* at) {
        std::memcpy(to + i * size, at + tile.first_head * head_dim, size * sizeof(E));
    });
}

// Add one packed block of keys and values to what `rows` queries of one KV head have seen. `unseen` rows come before it.
template <class E>
inline void attend_block(const QueryTile<E>& tile, size_t start, size_t count, size_t unseen, size_t head_dim,
                         float scale, const AttentionScratch<E>& scratch) {
    const size_t key_panels = (count + kPanel - 1) / kPanel;
    each_tile(tile.queries * tile.group - unseen, [&](size_t offset, size_t height) {
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
                               std::min(kKeys, position + 1 - start), scale, scratch.maxima[row], scratch.totals[row]);
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
                    for (int p = 0; p < Panels; p++) _mm512_storeu_ps(at + r * head_dim + p * kPanel, sums[r][p]);
            });
        }
    });
}

// Blocks of keys outside, heads inside: all heads of a token lie side by side in memory.
template <class E>
void attend(const QueryTile<E>& tile, const Pages<E>& keys, const Pages<E>& values, size_t head_dim, float scale,
            const AttentionScratch<E>& scratch) {
    const size_t rows = tile.queries * tile.group, context = tile.first_position + tile.queries;
    const auto of_head = [&](size_t head) {
        AttentionScratch<E> own = scratch;
        own.queries += head * rows * head_dim;
        own.sums += head * rows * head_dim;
        own.maxima += head * rows;
        own.totals += head * rows;
        return own;
    };
    const size_t group_size = tile.group * head_dim;
    for (size_t head = 0; head < tile.heads; head++)
        for (size_t t = 0; t < tile.queries; t++)
            std::copy_n(tile.q + t * tile.stride + (tile.first_head + head) * group_size, group_size,
                        of_head(head).queries + t * group_size);
    std::fill_n(scratch.sums, tile.heads * rows * head_dim, 0.0f);
    std::fill_n(scratch.totals, tile.heads * rows, 0.0f);
    std::fill_n(scratch.maxima, tile.heads * rows, kNoMaximum);

    for (size_t start = 0; start < context; start += kKeys) {
        const size_t count = std::min(kKeys, context - start);
        gather(scratch.key_rows, keys, tile, start, count, head_dim);
        gather(scratch.value_rows, values, tile, start, count, head_dim);
        const size_t unseen = start > tile.first_position ? (start - tile.first_position) * tile.group : 0;
        for (size_t head = 0; head < tile.heads; head++) {
            pack_keys(scratch.keys, scratch.key_rows + head * head_dim, tile.heads * head_dim, count, head_dim);
            pack_values(scratch.values, scratch.value_rows + head * head_dim, tile.heads * head_dim, count, head_dim);
            attend_block(tile, start, count, unseen, head_dim, scale, of_head(head));
        }
    }
    for (size_t head = 0; head < tile.heads; head++) {
        const AttentionScratch<E> own = of_head(head);
        for (size_t row = 0; row < rows; row++) {
            const __m512 share = _mm512_set1_ps(1.0f / own.totals[row]);
            E* to = tile.out + row / tile.group * tile.stride + (tile.first_head + head) * group_size +
                    row % tile.group * head_dim;
            for (size_t d = 0; d < head_dim; d += 16)
                store16(to + d, _mm512_mul_ps(_mm512_loadu_ps(own.sums + row * head_dim + d), share));
        }
    }
}

}  // namespace pdd
