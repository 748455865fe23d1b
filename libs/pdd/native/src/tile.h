// The product that everything heavy is made of: a few rows times a few panels, all sums in registers.
//
// A panel is 16 columns of a matrix: for each lane's worth of k (one float, or two bfloat16 side by side) the 16 columns
// one after the other. Each sum runs over k in order in one accumulator: a row's result depends on nothing but the row
// and the matrix, whatever else is in the batch.
#pragma once

#include "element.h"

namespace pdd {

constexpr size_t kPanel = 16;
constexpr int kTileRows = 6;    // 6 x 4 accumulators, 4 panels' vectors and a broadcast fill the 32 registers
constexpr int kTilePanels = 4;

// Inlined always: only then do the sums stay in registers.
template <class E, int Rows, int Panels>
[[gnu::always_inline]] inline void multiply(const E* a, size_t a_stride, const E* panels, size_t k, __m512 (&sums)[Rows][Panels]) {
    const size_t panel_size = k * kPanel;
    for (size_t i = 0; i < k; i += E::kPerLane) {
        __m512i b[Panels];
#pragma GCC unroll 4
        for (int p = 0; p < Panels; p++) b[p] = _mm512_loadu_si512(panels + p * panel_size + i * kPanel);
#pragma GCC unroll 6
        for (int r = 0; r < Rows; r++) {
            int32_t lane;
            std::memcpy(&lane, a + r * a_stride + i, sizeof lane);
            const __m512i both = _mm512_set1_epi32(lane);
#pragma GCC unroll 4
            for (int p = 0; p < Panels; p++) sums[r][p] = E::multiply_add(sums[r][p], both, b[p]);
        }
    }
}

// Call `work.template operator()<Rows, Panels>()` with compile-time sizes for `rows` (1 to 6) and `panels` (1 to 4).
template <int Rows = kTileRows, int Panels = kTilePanels, class Work>
inline void with_tile(size_t rows, size_t panels, const Work& work) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return with_tile<Rows - 1, Panels>(rows, panels, work);
    }
    if constexpr (Panels > 1) {
        if (panels < Panels) return with_tile<Rows, Panels - 1>(rows, panels, work);
    }
    work.template operator()<Rows, Panels>();
}

// Cut `rows` into as few tiles as possible, as even as possible, and call `work(first, count)` for each.
template <class Work>
inline void each_tile(size_t rows, const Work& work) {
    const size_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (size_t t = 0; t < tiles; t++) {
        const size_t first = rows * t / tiles;
        work(first, rows * (t + 1) / tiles - first);
    }
}

}  // namespace pdd
