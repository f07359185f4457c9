// The scan of a memory under the delta rule, row by row, in blocks of tokens that stay in a core's cache.
//
// A row is one sequence and head. What is computed is `memory_scan.scan_plain` with `memory_delta.DeltaMemories`, whose
// docstrings have the equations; the letters here are theirs. `delta_rows.py` calls it through ctypes.
//
// Axes: D head width, K kernel size of the convolution, n tokens of a block. Matrices of tokens are [token][D]. Rows of
// a block are padded to fours, columns of [token][token] to vectors; the padding is 0.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "products.h"
#include "vectors.h"

using namespace hope;

// What `_Arguments` of `delta_rows.py` describes; pointers that may be null are marked with `?`.
template <class T>
struct Arguments {
  int64_t rows, slots, width, taps, blocks;
  // first slot of each block, then the number of slots [blocks + 1]
  const int64_t* starts;
  // ? whether the block goes on with the document before it [blocks, rows]
  const uint8_t* continues;
  // ? slots before each slot that belong to its document, at most K - 1 [rows, slots]
  const uint8_t* reach;
  // ? slots before a row's first token: the tail stands before them [rows]
  const int64_t* offset;
  // k, v, q [rows, slots, D], and the distances of rows and slots
  const T* inputs[3];
  int64_t input_strides[3][2];
  // [rows, slots]; ? the last two
  const T *rate, *log_retention, *value_norm, *erased;
  // [K, rows, 3 D], [rows, D, D], [rows]
  const T *conv_weights, *initial, *value_share;
  // [rows, K - 1, 3 D]
  const T* tail;
  // S, before and after the scan [rows, D, D]
  T* current;
  // reads [rows, slots, D], and the distances of rows and slots
  T* reads;
  int64_t read_strides[2];
  // ? what the backward pass reads: A [rows, slots, D], and S before each block [rows, blocks, D, D]
  T *errors, *states;

  // Of the backward pass alone. `reads` are then gradients, `current` is S after the scan (?), and `grad_current` its
  // gradient, which becomes that of S before it.
  T* grad_current;
  // [rows, slots, D]
  T* grad_inputs[3];
  // [rows, slots]; ? the last two
  T *grad_rate, *grad_log_retention, *grad_value_norm, *grad_erased;
  // of each row [rows, K, 3 D], [rows, D, D], [rows], [rows, K - 1, 3 D]; zero before
  T *grad_conv_weights, *grad_initial, *grad_value_share, *grad_tail;
};

namespace {

// tokens of a block
constexpr int kBlock = 32;
// added to squared norms, `memory_scan.NORM_EPSILON`
constexpr double kNormEpsilon = 1e-6;
constexpr int kMostTaps = 8;

// One row, and the work space of a block.
template <class T>
class Row {
 public:
  explicit Row(const Arguments<T>& arguments) : in(arguments), D(arguments.width), K(arguments.taps) {
    const size_t tokens = kBlock * D, square = kBlock * kBlock, matrix = D * D;
    const size_t padded_tokens = (kBlock + kMostTaps) * D;
    const size_t numbers = 6 * padded_tokens + 19 * tokens + 4 * square + 2 * matrix + 7 * kBlock;
    memory = static_cast<T*>(aligned_alloc(64, (numbers * sizeof(T) + 63) / 64 * 64));
    memset(memory, 0, numbers * sizeof(T));
    T* next = memory;
    auto take = [&next](size_t count) {
      T* taken = next;
      next += count;
      return taken;
    };
    for (int stream = 0; stream < 3; ++stream) {
      raw[stream] = take(padded_tokens);
      grad_mixed[stream] = take(padded_tokens);
      mixed[stream] = take(tokens);
      sigmoid[stream] = take(tokens);
      unit[stream] = take(tokens);
      grad_unit[stream] = take(tokens);
      scales[stream] = take(kBlock);
    }
    written = take(tokens);
    values = take(tokens);
    errors = take(tokens);
    read = take(tokens);
    grad_written = take(tokens);
    decayed = take(tokens);
    transposed = take(tokens);
    lower = take(square);
    attention = take(square);
    decay = take(square);
    products = take(square);
    transposed_matrix = take(matrix);
    transposed_initial = take(matrix);
    total = take(kBlock);
    from_start = take(kBlock);
    to_end = take(kBlock);
    rate = take(kBlock);
  }
  ~Row() { free(memory); }

  void forward(int64_t row_index) {
    row = row_index;
    T* state = in.current + row * D * D;
    for (int64_t block = 0; block < in.blocks; ++block) {
      if (!goes_on(block)) memset(state, 0, D * D * sizeof(T));
      if (in.states) memcpy(in.states + (row * in.blocks + block) * D * D, state, D * D * sizeof(T));
      make_tokens(block);
      read_keys(state);
      read_queries(state);
      write(state);
    }
  }

  void backward(int64_t row_index) {
    row = row_index;
    T* grad_after = in.grad_current + row * D * D;
    for (int stream = 0; stream < 3; ++stream) memset(grad_mixed[stream], 0, (kBlock + kMostTaps) * D * sizeof(T));
    transpose(D, D, in.initial + row * D * D, D, transposed_initial, D);
    const T* state_after = in.current ? in.current + row * D * D : nullptr;
    for (int64_t block = in.blocks - 1; block >= 0; --block) {
      const T* state = in.states + (row * in.blocks + block) * D * D;
      make_tokens(block);
      const int64_t first = in.starts[block];
      memcpy(errors, in.errors + (row * in.slots + first) * D, size * D * sizeof(T));
      memset(errors + size * D, 0, (padded - size) * D * sizeof(T));
      backward_of_block(state, state_after, grad_after);
      if (!goes_on(block)) memset(grad_after, 0, D * D * sizeof(T));
      state_after = state;
    }
  }

 private:
  bool goes_on(int64_t block) const { return !in.continues || in.continues[block * in.rows + row]; }
  int reach_of(int64_t slot) const { return in.reach ? in.reach[row * in.slots + slot] : K - 1; }
  int64_t first_slot() const { return in.offset ? in.offset[row] : 0; }
  const T* conv_weight(int tap, int stream) const {
    return in.conv_weights + (tap * in.rows + row) * 3 * D + stream * D;
  }
  const T* initial() const { return in.initial + row * D * D; }

  // Keys, values, queries, gates, and the products of queries and keys of a block.
  void make_tokens(int64_t block) {
    start = in.starts[block];
    size = in.starts[block + 1] - start;
    constexpr int multiple = kLanes<T> > kTileRows ? kLanes<T> : kTileRows;
    padded = (size + multiple - 1) / multiple * multiple;
    make_gates();
    for (int stream = 0; stream < 3; ++stream) {
      gather(stream);
      mix(stream);
    }
    for (int t = 0; t < padded; ++t) {
      scale<T>(D, -rate[t], unit[0] + t * D, written + t * D);
      const T norm = in.value_norm && t < size ? in.value_norm[row * in.slots + start + t] : T(1);
      scale<T>(D, norm, unit[1] + t * D, values + t * D);
    }
    transpose(padded, D, written, D, transposed, kBlock);
    product(padded, padded, D, unit[0], D, 1, transposed, kBlock, lower, kBlock, false, Part::kLowerResult);
    product(padded, padded, D, unit[2], D, 1, transposed, kBlock, attention, kBlock, false, Part::kLowerResult);
    times_decay(lower, /*strict=*/true);
    times_decay(attention, /*strict=*/false);
  }

  void make_gates() {
    const T* log_retention = in.log_retention + row * in.slots + start;
    T sum = 0;
    for (int t = 0; t < padded; ++t) {
      if (t < size) sum += log_retention[t];
      total[t] = sum;
      rate[t] = t < size ? in.rate[row * in.slots + start + t] : T(0);
    }
    for (int t = 0; t < padded; t += kLanes<T>) {
      store<T>(from_start + t, exp_of<T>(load(total + t)));
      store<T>(to_end + t, exp_of<T>(sum - load(total + t)));
    }
    for (int t = 0; t < padded; ++t)
      for (int i = 0; i <= t; i += kLanes<T>)
        store<T>(decay + t * kBlock + i, exp_of<T>(total[t] - load(total + i)));
  }

  // Multiply a lower triangle of products by e^(g_t - g_i), and make the rest of the tiles 0.
  void times_decay(T* matrix, bool strict) const {
    for (int t = 0; t < padded; ++t) {
      T* line = matrix + t * kBlock;
      const int kept = t + (strict ? 0 : 1);
      for (int i = 0; i < kept; i += kLanes<T>) store<T>(line + i, load(line + i) * load(decay + t * kBlock + i));
      for (int i = kept; i < padded; ++i) line[i] = 0;
    }
  }

  // The block's inputs of a stream behind the K - 1 slots before it.
  void gather(int stream) {
    const int64_t row_stride = in.input_strides[stream][0], slot_stride = in.input_strides[stream][1];
    const T* inputs = in.inputs[stream] + row * row_stride;
    const T* tail = in.tail + row * (K - 1) * 3 * D + stream * D;
    const int64_t first = first_slot();
    for (int j = 0; j < K - 1 + size; ++j) {
      const int64_t slot = start - (K - 1) + j, in_tail = slot - first + (K - 1);
      T* to = raw[stream] + j * D;
      if (slot >= first || (slot >= 0 && in_tail < 0))
        copy<T>(D, inputs + slot * slot_stride, to);
      else if (in_tail >= 0)
        copy<T>(D, tail + in_tail * 3 * D, to);
    }
  }

  // Whether every slot of the block and behind it has K - 1 slots of its document before it, or inputs that are 0.
  bool is_inside_document() const {
    if (!in.reach) return true;
    const int64_t stop = start + size + K - 1;
    for (int64_t slot = start; slot < stop && slot < in.slots; ++slot)
      if (reach_of(slot) < K - 1) return false;
    return start >= first_slot();
  }

  // Convolution, SiLU and normalisation of a stream.
  void mix(int stream) {
    for (int t = 0; t < size; ++t) squares[t] = Vector<T>{};
    if (K == 4 && is_inside_document())
      activate<4>(stream);
    else
      activate<0>(stream);
    if (has_norm(stream))
      for (int t = 0; t < size; ++t) {
        const T factor = 1 / __builtin_sqrt(double(sum_of<T>(squares[t])) + kNormEpsilon);
        scales[stream][t] = factor;
        scale<T>(D, factor, unit[stream] + t * D, unit[stream] + t * D);
      }
    memset(unit[stream] + size * D, 0, (padded - size) * D * sizeof(T));
  }

  bool has_norm(int stream) const { return stream != 1 || in.value_norm; }

  // SiLU of a stream's convolution, in `unit`; `Taps` are all K of them, or 0 where documents begin.
  template <int Taps>
  void activate(int stream) {
    const bool is_backward = in.grad_current;
    for (int c = 0; c < D; c += kLanes<T>) {
      Vector<T> weights[kMostTaps];
      for (int tap = 0; tap < K; ++tap) weights[tap] = load(conv_weight(tap, stream) + c);
      for (int t = 0; t < size; ++t) {
        const T* newest = raw[stream] + (t + K - 1) * D + c;
        const int reach = Taps ? Taps - 1 : reach_of(start + t);
        Vector<T> sum{};
        for (int back = 0; back <= reach; ++back) sum += weights[K - 1 - back] * load(newest - back * D);
        const Vector<T> share = sigmoid_of<T>(sum);
        const Vector<T> active = sum * share;
        squares[t] += active * active;
        store<T>(unit[stream] + t * D + c, active);
        if (is_backward) {
          store<T>(mixed[stream] + t * D + c, sum);
          store<T>(sigmoid[stream] + t * D + c, share);
        }
      }
    }
  }

  // A: what the memory returns for the keys before the block, minus the values, and solved for the writes before.
  void read_keys(const T* state) {
    product(padded, D, D, unit[0], D, 1, state, D, errors, D);
    for (int t = 0; t < padded; ++t) scale<T>(D, from_start[t], errors + t * D, errors + t * D);
    product(padded, D, D, unit[0], D, 1, initial(), D, errors, D, true);
    for (int t = 0; t < padded; ++t) add_scaled<T>(D, -1, values + t * D, errors + t * D);
    for (int m = 0; m < padded; m += kTileRows) {
      four_rows(D, 0, m, lower + m * kBlock, kBlock, 1, errors, D, errors + m * D, D, true);
      for (int t = m + 1; t < m + kTileRows; ++t)
        for (int i = m; i < t; ++i) add_scaled<T>(D, lower[t * kBlock + i], errors + i * D, errors + t * D);
    }
    if (in.errors) memcpy(in.errors + (row * in.slots + start) * D, errors, size * D * sizeof(T));
  }

  void read_queries(const T* state) {
    product(padded, D, D, unit[2], D, 1, state, D, read, D);
    for (int t = 0; t < padded; ++t) scale<T>(D, from_start[t], read + t * D, read + t * D);
    product(padded, D, D, unit[2], D, 1, initial(), D, read, D, true);
    product(padded, D, padded, attention, kBlock, 1, errors, D, read, D, true, Part::kLowerFactor);
    for (int t = 0; t < size; ++t) {
      add_scaled<T>(D, share_of(t), values + t * D, read + t * D);
      T* to = in.reads + row * in.read_strides[0] + (start + t) * in.read_strides[1];
      copy<T>(D, read + t * D, to);
    }
  }

  // The share of a token's value in its own read.
  T share_of(int t) const {
    const T erased = in.erased ? in.erased[row * in.slots + start + t] : T(1);
    return in.value_share[row] * erased;
  }

  // S after the block.
  void write(T* state) {
    for (int t = 0; t < padded; ++t) scale<T>(D, to_end[t], written + t * D, decayed + t * D);
    scale<T>(D * D, from_start[padded - 1], state, state);
    product(D, D, padded, decayed, 1, D, errors, D, state, D, true);
  }

  void backward_of_block(const T* state, const T* state_after, T* grad_after) {
    // gradients of the reads; zero rows behind the last token
    for (int t = 0; t < size; ++t)
      memcpy(read + t * D, in.reads + row * in.read_strides[0] + (start + t) * in.read_strides[1], D * sizeof(T));
    memset(read + size * D, 0, (padded - size) * D * sizeof(T));
    const T* grad_reads = read;

    // of A, through reads and writes; it becomes that of what keys return
    T* grad_right = grad_unit[1];
    product(padded, D, padded, attention, 1, kBlock, grad_reads, D, grad_right, D, false, Part::kUpperFactor);
    for (int t = 0; t < padded; ++t) scale<T>(D, to_end[t], written + t * D, decayed + t * D);
    product(padded, D, D, decayed, D, 1, grad_after, D, grad_right, D, true);
    transpose(D, D, grad_after, D, transposed_matrix, D);
    product(padded, D, D, errors, D, 1, transposed_matrix, D, grad_written, D);
    for (int t = 0; t < padded; ++t) scale<T>(D, to_end[t], grad_written + t * D, grad_written + t * D);
    const T grad_of_last = state_after ? dot<T>(D * D, grad_after, state_after) : T(0);
    scale<T>(D * D, from_start[padded - 1], grad_after, grad_after);
    for (int m = padded - kTileRows; m >= 0; m -= kTileRows) {
      const int next = m + kTileRows;
      four_rows(D, next, padded, lower + m, 1, kBlock, grad_right, D, grad_right + m * D, D, true);
      for (int t = next - 2; t >= m; --t)
        for (int i = t + 1; i < next; ++i)
          add_scaled<T>(D, lower[i * kBlock + t], grad_right + i * D, grad_right + t * D);
    }

    // through what the memory before the block returns
    transpose(D, D, state, D, transposed_matrix, D);
    const T* returned[2] = {grad_right, grad_reads};
    for (int which = 0; which < 2; ++which) {
      const int stream = 2 * which;
      for (int t = 0; t < padded; ++t) scale<T>(D, from_start[t], returned[which] + t * D, decayed + t * D);
      product(padded, D, D, decayed, D, 1, transposed_matrix, D, grad_unit_of(which), D);
      product(D, D, padded, unit[stream], 1, D, decayed, D, grad_after, D, true);
    }

    // through the products of keys and queries with written keys
    transpose(padded, D, errors, D, transposed, kBlock);
    for (int which = 0; which < 2; ++which) {
      product(
          padded, padded, D, returned[which], D, 1, transposed, kBlock, products, kBlock, false, Part::kLowerResult);
      times_decay(products, /*strict=*/which == 0);
      product(padded, D, padded, products, 1, kBlock, unit[2 * which], D, grad_written, D, true, Part::kUpperFactor);
      product(padded, D, padded, products, kBlock, 1, written, D, grad_unit_of(which), D, true, Part::kLowerFactor);
    }

    gates_backward(grad_of_last);

    // through the initial memory
    for (int which = 0; which < 2; ++which) {
      product(padded, D, D, returned[which], D, 1, transposed_initial, D, grad_unit_of(which), D, true);
      product(D, D, padded, unit[2 * which], 1, D, returned[which], D, in.grad_initial + row * D * D, D, true);
    }
    for (int t = 0; t < size; ++t) add_scaled<T>(D, -rate[t], grad_written + t * D, grad_unit[0] + t * D);
    values_backward(grad_reads, grad_right);
    for (int stream = 0; stream < 3; ++stream) stream_backward(stream);
  }

  // Gradients of unit keys (0) and queries (1).
  T* grad_unit_of(int which) { return grad_unit[2 * which]; }

  // Where e^(g_t) scales a vector, the gradient of g_t is the vector's product with its own.
  void gates_backward(T grad_of_last) {
    T sum = grad_of_last;
    for (int t = size - 1; t >= 0; --t) {
      const int64_t slot = row * in.slots + start + t;
      const T* keys = unit[0] + t * D;
      const T grad_rate = -dot<T>(D, grad_written + t * D, keys);
      in.grad_rate[slot] = grad_rate;
      sum += dot<T>(D, grad_unit[0] + t * D, keys) + dot<T>(D, grad_unit[2] + t * D, unit[2] + t * D);
      sum -= grad_rate * rate[t];
      in.grad_log_retention[slot] = sum;
    }
  }

  // To values of unit norm, or without a norm to values; `grad_right` becomes their gradient.
  void values_backward(const T* grad_reads, T* grad_right) {
    for (int t = 0; t < size; ++t) {
      const int64_t slot = row * in.slots + start + t;
      T* grad = grad_right + t * D;
      const T* value = unit[1] + t * D;
      scale<T>(D, -1, grad, grad);
      add_scaled<T>(D, share_of(t), grad_reads + t * D, grad);
      T grad_share = dot<T>(D, grad_reads + t * D, value);
      if (in.value_norm) {
        const T norm = in.value_norm[slot];
        grad_share *= norm;
        in.grad_value_norm[slot] = dot<T>(D, grad, value);
        scale<T>(D, norm, grad, grad);
      }
      if (in.erased) {
        in.grad_erased[slot] = in.value_share[row] * grad_share;
        grad_share *= in.erased[slot];
      }
      in.grad_value_share[row] += grad_share;
    }
  }

  // Through norm, SiLU and convolution of a stream.
  void stream_backward(int stream) {
    T* of_mixed = grad_mixed[stream];
    // the first rows of the block behind this one stand behind this one's
    memmove(of_mixed + size * D, of_mixed, (K - 1) * D * sizeof(T));
    for (int t = 0; t < size; ++t) {
      const T* grad = grad_unit[stream] + t * D;
      const T* direction = unit[stream] + t * D;
      T along = 0, factor = 1;
      if (has_norm(stream)) {
        along = dot<T>(D, grad, direction);
        factor = scales[stream][t];
      }
      for (int c = 0; c < D; c += kLanes<T>) {
        const Vector<T> x = load(mixed[stream] + t * D + c), share = load(sigmoid[stream] + t * D + c);
        const Vector<T> grad_active = factor * (load(grad + c) - along * load(direction + c));
        store<T>(of_mixed + t * D + c, grad_active * share * (1 + x * (1 - share)));
      }
    }
    if (K == 4 && is_inside_document())
      convolution_backward<4>(stream);
    else
      convolution_backward<0>(stream);
    if (start < first_slot() + K - 1) tail_backward(stream);
  }

  // To the inputs of a stream and the weights; `Taps` as in `convolve`.
  template <int Taps>
  void convolution_backward(int stream) {
    T* to = in.grad_inputs[stream] + (row * in.slots + start) * D;
    T* grad_weights = in.grad_conv_weights + row * K * 3 * D + stream * D;
    for (int c = 0; c < D; c += kLanes<T>) {
      const T* of_mixed = grad_mixed[stream] + c;
      Vector<T> weights[kMostTaps], sums[kMostTaps] = {};
      for (int tap = 0; tap < K; ++tap) weights[tap] = load(conv_weight(tap, stream) + c);
      for (int t = 0; t < size; ++t) {
        Vector<T> grad{};
        const int last = Taps ? Taps : K;
        for (int later = 0; later < last; ++later)
          if (Taps || reads(start + t + later, later))
            grad += weights[K - 1 - later] * load(of_mixed + (t + later) * D);
        store<T>(to + t * D + c, grad);
        const int reach = Taps ? Taps - 1 : reach_of(start + t);
        const Vector<T> own = load(of_mixed + t * D);
        for (int back = 0; back <= reach; ++back)
          sums[K - 1 - back] += own * load(raw[stream] + (t + K - 1 - back) * D + c);
      }
      for (int tap = 0; tap < K; ++tap) {
        T* sum = grad_weights + tap * 3 * D + c;
        store<T>(sum, load(sum) + sums[tap]);
      }
    }
  }

  // Whether the convolution at `slot` reads the input `back` slots before it, which is no tail.
  bool reads(int64_t slot, int back) const {
    return slot < in.slots && back <= reach_of(slot) && slot - back >= first_slot();
  }

  // To the tail before the row's first token.
  void tail_backward(int stream) {
    T* grad_tail = in.grad_tail + row * (K - 1) * 3 * D + stream * D;
    for (int t = 0; t < size; ++t) {
      const int64_t from_first = start + t - first_slot();
      if (from_first < 0) continue;
      for (int64_t back = from_first + 1; back <= reach_of(start + t); ++back)
        add_product(
            grad_mixed[stream] + t * D, conv_weight(K - 1 - back, stream),
            grad_tail + (K - 1 + from_first - back) * 3 * D);
    }
  }

  // z += x * y, number by number.
  void add_product(const T* x, const T* y, T* z) const {
    for (int c = 0; c < D; c += kLanes<T>) store<T>(z + c, load(z + c) + load(x + c) * load(y + c));
  }

  const Arguments<T>& in;
  const int D, K;
  int64_t row = 0, start = 0;
  int size = 0, padded = 0;
  T* memory;
  // of k, v and q: inputs behind those of the K - 1 slots before, results of the convolution, their sigmoid, results
  // of the norm, and what it multiplies by
  T *raw[3], *mixed[3], *sigmoid[3], *unit[3], *scales[3];
  T *grad_mixed[3], *grad_unit[3];
  // of a stream's tokens, each lane for itself
  Vector<T> squares[kBlock];
  // -eta k, values as written, A, reads or their gradients
  T *written, *values, *errors, *read;
  T *grad_written, *decayed, *transposed;
  // [token, token]
  T *lower, *attention, *decay, *products;
  // [D, D]
  T *transposed_matrix, *transposed_initial;
  // g, e^g, e^(g_n - g), eta
  T *total, *from_start, *to_end, *rate;
};

template <class T>
void run(const Arguments<T>& arguments, int64_t first, int64_t last) {
  Row<T> work(arguments);
  for (int64_t row = first; row < last; ++row) arguments.grad_current ? work.backward(row) : work.forward(row);
}

}  // namespace

// Rows `first` to `last` of a scan, or of its backward pass if `grad_current` is given. Threads take different rows.
extern "C" void hope_scan_float32(const Arguments<float>* arguments, int64_t first, int64_t last) {
  run(*arguments, first, last);
}
extern "C" void hope_scan_float64(const Arguments<double>* arguments, int64_t first, int64_t last) {
  run(*arguments, first, last);
}
// Bytes of `Arguments`, which a test compares with those of `_Arguments`.
extern "C" int64_t hope_scan_size() { return sizeof(Arguments<float>); }
