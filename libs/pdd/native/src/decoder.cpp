// The forward pass of a dense decoder over a ragged batch, on CPUs with AVX-512 and its bfloat16 products.
//
// One call is one step: threads enter once and meet at barriers between phases. The residual stream, sums, softmax and
// logits are float; weights, KV and what goes into a product are of the model's type. No result depends on what else is
// in the batch (see tile.h and attention.h), nor on the number of threads.
#include <omp.h>

#include <cmath>
#include <optional>

#include "attention.h"
#include "barrier.h"
#include "linear.h"

namespace pdd {

extern "C" {

// Matrices are packed; norms and biases are float; what a model does not have is null.
struct Layer {
    const float *input_norm, *q_norm, *k_norm, *mlp_norm;
    const void *qkv, *attention_out, *gate_up, *down;
    const float *qkv_bias, *attention_out_bias, *gate_up_bias, *down_bias;
    void *keys, *values;  // of block 0
};

struct Model {
    int64_t is_bfloat16, hidden, heads, kv_heads, head_dim, intermediate, vocab, num_layers;
    int64_t block_size, block_stride, token_stride;  // strides of the KV pool, in elements
    float rms_norm_eps;
    const Layer* layers;
    const void* embedding;  // packed, too
    const float* norm;
    const void* head;
};

// Sequence i has query tokens `starts[i]` to `starts[i + 1]`, the last of `contexts[i]` tokens, and its block table at
// `blocks[tables[i]]`. `cos` and `sin` are [tokens, head_dim / 2].
struct Step {
    int64_t tokens, sequences, rows;
    const int32_t *ids, *starts, *contexts, *tables, *blocks, *rows_wanted;
    const float *cos, *sin;
};

}  // extern "C"

namespace {

struct Arena {
    char* at;
    size_t used = 0;
    template <class T>
    T* take(size_t count) {
        T* taken = reinterpret_cast<T*>(at + used);
        used += (count * sizeof(T) + 63) / 64 * 64;
        return taken;
    }
};

size_t queries_of_tile(const Model& m) { return std::max<size_t>(kQueryRows * m.kv_heads / m.heads, 1); }

template <class E>
struct Workspace {
    float *x, *qkv, *last;
    E *q, *attended, *activated;
    // Of each thread:
    E* normed;
    AttentionScratch<E> attention;

    Workspace(char* memory, const Model& m, size_t tokens, size_t rows, int thread) {
        Arena arena{memory};
        const size_t q_size = m.heads * m.head_dim, qkv_size = q_size + 2 * m.kv_heads * m.head_dim;
        x = arena.take<float>(tokens * m.hidden);
        qkv = arena.take<float>(tokens * qkv_size);
        last = arena.take<float>(rows * m.hidden);
        q = arena.take<E>(tokens * q_size);
        attended = arena.take<E>(tokens * q_size);
        activated = arena.take<E>(tokens * m.intermediate);
        const size_t tile = queries_of_tile(m) * m.heads / m.kv_heads;
        const auto own = [&] {
            normed = arena.take<E>(kRowBlock * m.hidden);
            attention.key_rows = arena.take<E>(kKeys * m.kv_heads * m.head_dim);
            attention.value_rows = arena.take<E>(kKeys * m.kv_heads * m.head_dim);
            attention.queries = arena.take<E>(queries_of_tile(m) * q_size);
            attention.keys = arena.take<E>(kKeys * m.head_dim);
            attention.values = arena.take<E>(kKeys * m.head_dim);
            attention.weights = arena.take<E>(tile * kKeys);
            attention.scores = arena.take<float>(tile * kKeys);
            attention.sums = arena.take<float>(queries_of_tile(m) * q_size);
            attention.maxima = arena.take<float>(queries_of_tile(m) * m.heads);
            attention.totals = arena.take<float>(queries_of_tile(m) * m.heads);
        };
        for (int i = 0; i <= thread; i++) own();
        size = arena.used;
    }
    size_t size;
};

template <class E>
void rms_norm(E* to, const float* x, const float* weight, size_t size, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (size_t i = 0; i < size; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / size + eps));
    for (size_t i = 0; i < size; i += 16)
        store16(to + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), scale), _mm512_loadu_ps(weight + i)));
}

// Normalise one head if the model does, rotate the pairs (i, i + size / 2), and store it.
template <class E>
void rotate(E* to, const float* from, const float* norm, size_t size, float eps, const float* cos, const float* sin) {
    float head[512], turned[512];
    if (norm != nullptr) {
        rms_norm(reinterpret_cast<Float32*>(head), from, norm, size, eps);
        from = head;
    }
    const size_t half = size / 2;
    for (size_t i = 0; i < half; i++) {
        turned[i] = from[i] * cos[i] - from[i + half] * sin[i];
        turned[i + half] = from[i + half] * cos[i] + from[i] * sin[i];
    }
    for (size_t i = 0; i < size; i += 16) store16(to + i, _mm512_loadu_ps(turned + i));
}

__m512 with_bias(__m512 sums, const float* bias, size_t column) {
    return bias == nullptr ? sums : _mm512_add_ps(sums, _mm512_loadu_ps(bias + column));
}

// What the threads of a step share besides memory.
struct Team {
    explicit Team(int threads) : size(threads), barrier(threads) {}
    const int size;
    Barrier barrier;
    std::atomic<size_t> next_tile[2] = {0, 0};  // of attention, in odd and even layers
};

template <class E>
class Forward {
  public:
    Forward(const Model& model, const Step& step, float* logits, char* memory, int thread, Team& team)
        : m_(model),
          step_(step),
          logits_(logits),
          thread_(thread),
          threads_(team.size),
          team_(team),
          q_size_(model.heads * model.head_dim),
          kv_size_(model.kv_heads * model.head_dim),
          work_(memory, model, step.tokens, step.rows, thread) {}

    void run() {
        embed();
        for (int64_t i = 0; i < m_.num_layers; i++) layer(m_.layers[i], team_.next_tile[i % 2]);
        for (int64_t i = first(step_.rows); i < end(step_.rows); i++)
            std::copy_n(work_.x + step_.rows_wanted[i] * m_.hidden, m_.hidden, work_.last + i * m_.hidden);
        barrier();
        head();
    }

  private:
    // This thread's share of `count` things.
    int64_t first(int64_t count) const { return count * thread_ / threads_; }
    int64_t end(int64_t count) const { return count * (thread_ + 1) / threads_; }
    void barrier() { team_.barrier.wait(); }

    void embed() {
        for (int64_t i = first(step_.tokens); i < end(step_.tokens); i++)
            unpack_row(work_.x + i * m_.hidden, static_cast<const E*>(m_.embedding), step_.ids[i], m_.hidden);
        barrier();
    }

    void layer(const Layer& layer, std::atomic<size_t>& next_tile) {
        const size_t qkv_size = q_size_ + 2 * kv_size_;
        linear<E>(matrix(layer.qkv, qkv_size, m_.hidden), step_.tokens, 1, thread_, threads_,
                  normed(work_.x, layer.input_norm), [&](size_t row, size_t panel, const __m512* sums, int panels) {
                      for (int p = 0; p < panels; p++) {
                          const size_t column = (panel + p) * kPanel;
                          _mm512_storeu_ps(work_.qkv + row * qkv_size + column,
                                           with_bias(sums[p], layer.qkv_bias, column));
                      }
                  });
        barrier();
        place(layer);
        barrier();
        attention(layer, next_tile);
        barrier();
        next_tile.store(0, std::memory_order_relaxed);  // for the layer after the next
        add_to_stream(matrix(layer.attention_out, m_.hidden, q_size_), layer.attention_out_bias, work_.attended);
        barrier();
        // Panels of gate and up alternate.
        linear<E>(matrix(layer.gate_up, 2 * m_.intermediate, m_.hidden), step_.tokens, 2, thread_, threads_,
                  normed(work_.x, layer.mlp_norm), [&](size_t row, size_t panel, const __m512* sums, int panels) {
                      for (int p = 0; p < panels; p += 2) {
                          const size_t column = (panel + p) / 2 * kPanel;
                          const __m512 gate = with_bias(sums[p], layer.gate_up_bias, column);
                          const __m512 up = with_bias(
                              sums[p + 1], layer.gate_up_bias == nullptr ? nullptr : layer.gate_up_bias + m_.intermediate,
                              column);
                          const __m512 one = _mm512_set1_ps(1.0f);
                          const __m512 inverse = _mm512_add_ps(one, exp2(_mm512_min_ps(
                              _mm512_mul_ps(gate, _mm512_set1_ps(-kLog2E)), _mm512_set1_ps(126.0f))));
                          store16(work_.activated + row * m_.intermediate + column,
                                  _mm512_mul_ps(_mm512_div_ps(gate, inverse), up));
                      }
                  });
        barrier();
        add_to_stream(matrix(layer.down, m_.hidden, m_.intermediate), layer.down_bias, work_.activated);
        barrier();
    }

    // Rotate queries and keys; keys and values go into the pool.
    void place(const Layer& layer) {
        const Pages<E> keys = pages(layer.keys), values = pages(layer.values);
        const size_t size = m_.head_dim;
        int64_t sequence = 0;
        for (int64_t t = first(step_.tokens); t < end(step_.tokens); t++) {
            while (t >= step_.starts[sequence + 1]) sequence++;
            const int32_t* blocks = step_.blocks + step_.tables[sequence];
            const size_t position = step_.contexts[sequence] - (step_.starts[sequence + 1] - t);
            const float *from = work_.qkv + t * (q_size_ + 2 * kv_size_), *cos = step_.cos + t * size / 2,
                        *sin = step_.sin + t * size / 2;
            for (int64_t h = 0; h < m_.heads; h++, from += size)
                rotate(work_.q + t * q_size_ + h * size, from, layer.q_norm, size, m_.rms_norm_eps, cos, sin);
            for (int64_t h = 0; h < m_.kv_heads; h++, from += size)
                rotate(keys.at(blocks, position) + h * size, from, layer.k_norm, size, m_.rms_norm_eps, cos, sin);
            for (size_t i = 0; i < kv_size_; i += 16)
                store16(values.at(blocks, position) + i, _mm512_loadu_ps(from + i));
        }
    }

    void attention(const Layer& layer, std::atomic<size_t>& next_tile) {
        const size_t size = m_.head_dim, group = m_.heads / m_.kv_heads, tile = queries_of_tile(m_);
        const float scale = kLog2E / std::sqrt(static_cast<float>(size));
        const auto tiles = [&](int64_t s) { return (step_.starts[s + 1] - step_.starts[s] + tile - 1) / tile; };
        size_t items = 0;
        for (int64_t s = 0; s < step_.sequences; s++) items += tiles(s);
        // All heads of a tile read each page but once; if tiles are few, heads are dealt out instead.
        const size_t shares = items < 2 * static_cast<size_t>(threads_) ? m_.kv_heads : 1, heads = m_.kv_heads / shares;
        int64_t sequence = 0;
        size_t before = 0;
        for (size_t item; (item = next_tile.fetch_add(1, std::memory_order_relaxed)) < items * shares;) {
            for (size_t own; item - before >= (own = tiles(sequence) * shares); before += own) sequence++;
            const size_t offset = (item - before) / shares * tile, head = (item - before) % shares * heads;
            const size_t start = step_.starts[sequence], queries = step_.starts[sequence + 1] - start;
            const size_t at = (start + offset) * q_size_;
            const QueryTile<E> query{step_.contexts[sequence] - queries + offset,
                                     std::min(tile, queries - offset),
                                     group,
                                     head,
                                     heads,
                                     step_.blocks + step_.tables[sequence],
                                     work_.q + at,
                                     work_.attended + at,
                                     q_size_};
            attend(query, pages(layer.keys), pages(layer.values), size, scale, work_.attention);
        }
    }

    void add_to_stream(const Matrix<E>& matrix, const float* bias, const E* x) {
        linear<E>(matrix, step_.tokens, 1, thread_, threads_, [&](size_t row, size_t) { return x + row * matrix.k; },
                  [&](size_t row, size_t panel, const __m512* sums, int panels) {
                      for (int p = 0; p < panels; p++) {
                          const size_t column = (panel + p) * kPanel;
                          float* to = work_.x + row * m_.hidden + column;
                          _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), with_bias(sums[p], bias, column)));
                      }
                  });
    }

    void head() {
        linear<E>(matrix(m_.head, m_.vocab, m_.hidden), step_.rows, 1, thread_, threads_, normed(work_.last, m_.norm),
                  [&](size_t row, size_t panel, const __m512* sums, int panels) {
                      for (int p = 0; p < panels; p++) {
                          const size_t column = (panel + p) * kPanel;
                          _mm512_mask_storeu_ps(logits_ + row * m_.vocab + column, first_lanes(m_.vocab - column),
                                                sums[p]);
                      }
                  });
    }

    // Rows of x for `linear`, normalised into this thread's own memory.
    auto normed(const float* x, const float* weight) {
        return [this, x, weight](size_t row, size_t count) {
            for (size_t i = 0; i < count; i++)
                rms_norm(work_.normed + i * m_.hidden, x + (row + i) * m_.hidden, weight, m_.hidden, m_.rms_norm_eps);
            return work_.normed;
        };
    }

    static Matrix<E> matrix(const void* panels, size_t rows, size_t k) {
        return {static_cast<const E*>(panels), (rows + kPanel - 1) / kPanel, k};
    }

    Pages<E> pages(void* base) const {
        return {static_cast<E*>(base), static_cast<size_t>(m_.block_stride),
                static_cast<size_t>(m_.token_stride), static_cast<size_t>(m_.block_size)};
    }

    const Model& m_;
    const Step& step_;
    float* logits_;
    const int thread_, threads_;
    Team& team_;
    const size_t q_size_, kv_size_;
    Workspace<E> work_;
};

template <class E>
void forward(const Model& model, const Step& step, float* logits, char* memory, int threads) {
    // OpenMP is torch's: its threads are used, not others beside them. It may give fewer than were asked for.
    std::optional<Team> team;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        team.emplace(omp_get_num_threads());
        Forward<E>(model, step, logits, memory, omp_get_thread_num(), *team).run();
    }
}

}  // namespace

extern "C" {

// Bytes of memory, 64-byte aligned, that `pdd_forward` needs for a step of `tokens` with logits of `rows` of them.
int64_t pdd_workspace(const Model* model, int64_t tokens, int64_t rows, int threads) {
    return model->is_bfloat16 ? Workspace<BFloat16>(nullptr, *model, tokens, rows, threads - 1).size
                              : Workspace<Float32>(nullptr, *model, tokens, rows, threads - 1).size;
}

// Logits, [rows, vocab], of a step's wanted rows.
void pdd_forward(const Model* model, const Step* step, float* logits, void* memory, int threads) {
    (model->is_bfloat16 ? forward<BFloat16> : forward<Float32>)(*model, *step, logits, static_cast<char*>(memory),
                                                                threads);
}

// See `pack`.
void pdd_pack(void* panels, const void* plain, int64_t rows, int64_t k, int64_t first, int64_t step, int is_bfloat16) {
    if (is_bfloat16)
        pack(static_cast<BFloat16*>(panels), static_cast<const BFloat16*>(plain), rows, k, first, step);
    else
        pack(static_cast<Float32*>(panels), static_cast<const Float32*>(plain), rows, k, first, step);
}

// Products of `count` matrices of whole panels, one after the other, and nothing else: what a step costs at least.
// `sizes` are rows and k of each. `memory` holds inputs, results follow: 2 x tokens x the largest size, in floats.
void pdd_products(const void* const* matrices, const int64_t* sizes, int64_t count, int64_t tokens, void* memory,
                  int is_bfloat16, int threads) {
    const auto run = [&]<class E>(E* x) {
        Team team(threads);
        float* y = reinterpret_cast<float*>(x) + tokens * *std::max_element(sizes, sizes + 2 * count);
#pragma omp parallel num_threads(threads)
        for (int64_t i = 0; i < count; i++) {
            const size_t rows = sizes[2 * i], k = sizes[2 * i + 1];
            linear<E>({static_cast<const E*>(matrices[i]), rows / kPanel, k}, tokens, 1, omp_get_thread_num(), threads,
                      [&](size_t row, size_t) { return x + row * k; },
                      [&](size_t row, size_t panel, const __m512* sums, int panels) {
                          for (int p = 0; p < panels; p++)
                              _mm512_storeu_ps(y + row * rows + (panel + p) * kPanel, sums[p]);
                      });
            team.barrier.wait();
        }
    };
    if (is_bfloat16)
        run(static_cast<BFloat16*>(memory));
    else
        run(static_cast<Float32*>(memory));
}

}  // extern "C"
}  // namespace pdd
