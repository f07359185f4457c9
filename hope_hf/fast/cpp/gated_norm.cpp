// rms_norm(x) weight silu(gate) of rows of numbers, and its gradients: each number is read once from memory.
//
// `gated_norm.py` calls it through ctypes, and has the equations. Axes: W numbers of a row; rows lie in three outer axes.

#include <cstdint>

#include "vectors.h"

using namespace hope;

// What `_Arguments` of `gated_norm.py` describes; pointers that may be null are marked with `?`.
template <class T>
struct NormArguments {
  int64_t sizes[3], width;
  double epsilon;
  const T* weight;
  // distances of rows along the outer axes
  const T *x, *gate;
  int64_t x_strides[3], gate_strides[3];
  // 1 / rms of each row [rows], written by the forward pass
  T* scale;
  // result, or in a backward pass its gradient
  T* out;
  int64_t out_strides[3];
  // of the backward pass alone, ? the first: [rows, W], [rows, W], and [parts, W], zero before
  T *grad_x, *grad_gate, *grad_weight;
  int64_t parts;
};

namespace {

template <class T>
class Norm {
 public:
  Norm(const NormArguments<T>& arguments, int64_t part) : in(arguments), W(arguments.width), part(part) {}

  void run() {
    const int64_t rows = in.sizes[0] * in.sizes[1] * in.sizes[2];
    const int64_t first = rows * part / in.parts, last = rows * (part + 1) / in.parts;
    const int64_t outer = first / in.sizes[2];
    index[0] = outer / in.sizes[1];
    index[1] = outer % in.sizes[1];
    index[2] = first % in.sizes[2];
    for (int64_t row = first; row < last; ++row, next()) in.grad_x ? backward(row) : forward(row);
  }

 private:
  // Go on to the next row; no division by sizes, which takes longer than a row.
  void next() {
    for (int axis = 2; axis >= 0; --axis) {
      if (++index[axis] < in.sizes[axis]) return;
      index[axis] = 0;
    }
  }

  // Where the row begins in a tensor.
  int64_t place(const int64_t* strides) const {
    return index[0] * strides[0] + index[1] * strides[1] + index[2] * strides[2];
  }

  void forward(int64_t row) {
    const T* x = in.x + place(in.x_strides);
    const T* gate = in.gate + place(in.gate_strides);
    T* out = in.out + place(in.out_strides);
    const T factor = 1 / __builtin_sqrt(double(dot<T>(W, x, x)) / W + in.epsilon);
    in.scale[row] = factor;
    for (int c = 0; c < W; c += kLanes<T>) {
      const Vector<T> g = load(gate + c);
      store<T>(out + c, load(x + c) * factor * load(in.weight + c) * g * sigmoid_of<T>(g));
    }
  }

  void backward(int64_t row) {
    const T* x = in.x + place(in.x_strides);
    const T* gate = in.gate + place(in.gate_strides);
    const T* grad_out = in.out + place(in.out_strides);
    T* grad_x = in.grad_x + row * W;
    T* grad_weight = in.grad_weight + part * W;
    const T factor = in.scale[row];
    Vector<T> along{};
    for (int c = 0; c < W; c += kLanes<T>) {
      const Vector<T> weight = load(in.weight + c);
      const Vector<T> grad = load(grad_out + c), unit = load(x + c) * factor;
      const Vector<T> g = load(gate + c), sigmoid = sigmoid_of<T>(g);
      store<T>(in.grad_gate + row * W + c, grad * unit * weight * sigmoid * (1 + g * (1 - sigmoid)));
      const Vector<T> grad_normed = grad * g * sigmoid, grad_unit = grad_normed * weight;
      store<T>(grad_weight + c, load(grad_weight + c) + grad_normed * unit);
      along += grad_unit * unit;
      store<T>(grad_x + c, grad_unit);
    }
    const T mean = sum_of<T>(along) / W;
    for (int c = 0; c < W; c += kLanes<T>)
      store<T>(grad_x + c, (load(grad_x + c) - load(x + c) * factor * mean) * factor);
  }

  const NormArguments<T>& in;
  const int W;
  const int64_t part;
  // of the row along the outer axes
  int64_t index[3];
};

template <class T>
void run(const NormArguments<T>& arguments, int64_t first, int64_t last) {
  for (int64_t part = first; part < last; ++part) Norm<T>(arguments, part).run();
}

}  // namespace

// Parts `first` to `last` of the rows, or of the backward pass if `grad_x` is given. Threads take different parts.
extern "C" void hope_norm_float32(const NormArguments<float>* arguments, int64_t first, int64_t last) {
  run(*arguments, first, last);
}
extern "C" void hope_norm_float64(const NormArguments<double>* arguments, int64_t first, int64_t last) {
  run(*arguments, first, last);
}
// Bytes of `NormArguments`, which a test compares with those of `_Arguments`.
extern "C" int64_t hope_norm_size() { return sizeof(NormArguments<float>); }
