// Matrices in panels, and their product with all rows of a step, shared among threads.
#pragma once

#include <algorithm>

#include "tile.h"

namespace pdd {

constexpr size_t kRowBlock = 192;  // rows that stay in a core's second-level cache while panels pass by

// Put `rows` x `k` plain weights into every `step`-th panel from `first` on; the last panel is filled up with zeros.
template <class E>
void pack(E* panels, const E* plain, size_t rows, size_t k, size_t first, size_t step) {
    const size_t count = (rows + kPanel - 1) / kPanel;
    for (size_t p = 0; p < count; p++) {
        E* to = panels + (first + p * step) * k * kPanel;
        for (size_t i = 0; i < k; i++)
            for (size_t c = 0; c < kPanel; c++) {
                const size_t row = p * kPanel + c;
                E* at = to + (i / E::kPerLane * kPanel + c) * E::kPerLane + i % E::kPerLane;
                *at = row < rows ? plain[row * k + i] : E{0};
            }
    }
}

// One row of a packed matrix, back as it was, in float.
template <class E>
void unpack_row(float* to, const E* panels, size_t row, size_t k) {
    const E* panel = panels + row / kPanel * k * kPanel;
    const size_t c = row % kPanel;
    for (size_t i = 0; i < k; i++) to[i] = to_float(panel[(i / E::kPerLane * kPanel + c) * E::kPerLane + i % E::kPerLane]);
}

template <class E>
struct Matrix {
    const E* panels;
    size_t num_panels;
    size_t k;
};

// This thread's share of `x @ matrix.T`. `input(first, count)` gives rows `first` ... of x, `matrix.k` elements each;
// `output(row, panel, sums, Panels)` takes a row's sums of some panels. Panels are dealt out `unit` at a time.
template <class E, class Input, class Output>
void linear(const Matrix<E>& matrix, size_t rows, size_t unit, int thread, int threads, const Input& input,
            const Output& output) {
    const size_t units = matrix.num_panels / unit;
    const size_t blocks = (rows + kRowBlock - 1) / kRowBlock;
    size_t next = units * blocks * thread / threads;
    const size_t end = units * blocks * (thread + 1) / threads;
    while (next < end) {
        const size_t block = next / units;
        const size_t stop = std::min(end, (block + 1) * units);
        const size_t first_row = block * kRowBlock;
        const size_t count = std::min(kRowBlock, rows - first_row);
        const E* a = input(first_row, count);
        size_t panel = (next - block * units) * unit;
        const size_t last_panel = (stop - block * units) * unit;
        for (; panel < last_panel; panel += kTilePanels) {
            const size_t width = std::min<size_t>(kTilePanels, last_panel - panel);
            const E* b = matrix.panels + panel * matrix.k * kPanel;
            each_tile(count, [&](size_t first, size_t height) {
                with_tile(height, width, [&]<int Rows, int Panels>() {
                    __m512 sums[Rows][Panels] = {};
                    multiply<E>(a + first * matrix.k, matrix.k, b, matrix.k, sums);
                    for (int r = 0; r < Rows; r++) output(first_row + first + r, panel, sums[r], Panels);
                });
            });
        }
        next = stop;
    }
}

}  // namespace pdd
