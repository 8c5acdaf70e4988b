// Arrays of timed problems: filling, cutting out, mirroring.
#include "cli/bench/data.hpp"

#include <algorithm>
#include <array>

namespace fovea::cli {

HeadArray::HeadArray(const char* name, const std::array<int64_t, 4>& shape, ElementType type, Layout layout)
    : shape_(shape) {
  const auto [batch, length, heads, size] = shape;
  if (layout == Layout::bshd) {
    strides_ = {length * heads * size, heads * size, size, 1};
    array_ = io::make_array(name, type, {batch, length, heads, size});
  } else {
    strides_ = {heads * length * size, size, length * size, 1};
    array_ = io::make_array(name, type, {batch, heads, length, size});
  }
}

Tensor HeadArray::tensor(void* data) const {
  return Tensor(data, view(array_).dtype(), shape_, strides_);
}

size_t HeadArray::offset(int64_t batch, int64_t row, int64_t head) const {
  return static_cast<size_t>(batch * strides_[0] + row * strides_[1] + head * strides_[2]) *
         io::element_size(array_.type);
}

Array HeadArray::cut_out(int64_t batch, IndexRange rows, IndexRange heads) const {
  Array part = io::make_array(array_.name, array_.type,
                              {1, rows.second - rows.first, heads.second - heads.first, shape_[3]});
  const size_t vector_bytes = static_cast<size_t>(shape_[3]) * io::element_size(array_.type);
  auto to = part.bytes.begin();
  for (int64_t row = rows.first; row < rows.second; ++row) {
    for (int64_t head = heads.first; head < heads.second; ++head) {
      const auto from = array_.bytes.begin() + static_cast<std::ptrdiff_t>(offset(batch, row, head));
      to = std::copy_n(from, vector_bytes, to);
    }
  }
  return part;
}

void HeadArray::fill_last_rows(int64_t rows, uint64_t seed) {
  fill_normal(array_, seed);
  const size_t vector_bytes = static_cast<size_t>(shape_[3]) * io::element_size(array_.type);
  for (int64_t batch = 0; batch < shape_[0]; ++batch) {
    for (int64_t row = 0; row < shape_[1] - rows; ++row) {
      for (int64_t head = 0; head < shape_[2]; ++head) {
        const auto from = array_.bytes.begin() + static_cast<std::ptrdiff_t>(offset(batch, row, head));
        std::fill_n(from, vector_bytes, std::byte{0});
      }
    }
  }
}

void fill_normal(Array& array, uint64_t seed) {
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  const auto draw = [&state] {
    state ^= state << 13;  // xorshift64 (Marsaglia 2003)
    state ^= state >> 7;
    return state ^= state << 17;
  };
  const auto normal = [&draw] {
    double sum = 0;  // four uniform numbers, of variance 1/12 each
    for (int i = 0; i < 4; ++i) sum += static_cast<double>(draw() >> 11) * 0x1p-53;
    return (sum - 2) * 1.7320508075688772;
  };
  switch (array.type) {
    case ElementType::e4m3: {
      // Each out of a few thousand: to encode takes longer than to draw.
      std::array<uint8_t, 4096> codes{};
      for (uint8_t& code : codes) code = encode_e4m3(normal());
      for (uint8_t& x : array.elements<uint8_t>()) x = codes[draw() >> 52];
      break;
    }
    case ElementType::f16:
      for (uint16_t& x : array.elements<uint16_t>()) x = encode_float16(normal());
      break;
    case ElementType::bf16:
      for (uint16_t& x : array.elements<uint16_t>()) x = encode_bfloat16(normal());
      break;
    case ElementType::f32:
      for (float& x : array.elements<float>()) x = static_cast<float>(normal());
      break;
    default:
      for (double& x : array.elements<double>()) x = normal();
  }
}

BenchData::BenchData(const Shape& s, bool backward, Expressions of, Layout layout, Gpu* gpu)
    : shape(s), expressions(std::move(of)), mirrors_(gpu) {
  const auto make = [&](const char* name, const std::array<int64_t, 4>& sizes) {
    return HeadArray(name, sizes, s.type, layout);
  };
  const auto lse_shape = s.lse();
  q = make("q", s.q());
  k = make("k", s.k());
  v = make("v", s.v());
  o = HeadArray("o", s.o(), output_type(s.type), layout);
  lse = io::make_array("lse", ElementType::f32, {lse_shape.begin(), lse_shape.end()});
  fill_normal(q.array(), 1);
  fill_normal(k.array(), 2);
  fill_normal(v.array(), 3);
  if (backward) {
    d_o = make("d_o", s.o());
    dq = make("dq", s.q());
    dk = make("dk", s.k());
    dv = make("dv", s.v());
  }
  for (const Array& tensor : expressions.tensors) {
    const bool has_gradient = backward && !expressions.score.empty() && is_real(tensor.type);
    d_tensors.push_back(has_gradient ? io::make_array("d" + tensor.name, ElementType::f32, tensor.shape)
                                     : Array{});
  }
  std::vector<const Array*> all = {&q.array(),   &k.array(),  &v.array(),  &o.array(), &lse,
                                   &d_o.array(), &dq.array(), &dk.array(), &dv.array()};
  for (const std::vector<Array>* more : {&expressions.tensors, &d_tensors}) {
    for (const Array& array : *more) all.push_back(&array);
  }
  for (const Array* array : all) mirrors_.add(*array);
}

void BenchData::download_outputs(Pass pass) {
  if (pass == Pass::forward) {
    mirrors_.download(o.array());
    mirrors_.download(lse);
  } else {
    for (HeadArray* gradient : {&dq, &dk, &dv}) mirrors_.download(gradient->array());
  }
}

Tensor BenchData::tensor(const HeadArray& array) const {
  return mirrors_.on_device(array.tensor(mirrors_.address(array.array())));
}

Problem BenchData::problem(Pass pass, const Terms& terms) const {
  Problem p;
  terms.apply(p);
  p.pass = pass;
  p.q = tensor(q);
  p.k = tensor(k);
  p.v = tensor(v);
  p.o = tensor(o);
  p.lse = mirrors_.tensor(lse);
  if (pass == Pass::backward) {
    p.d_o = tensor(d_o);
    p.dq = tensor(dq);
    p.dk = tensor(dk);
    p.dv = tensor(dv);
  }
  p.score = expressions.score;
  p.sees = expressions.sees;
  for (size_t i = 0; i < expressions.tensors.size(); ++i) {
    const bool has_gradient = pass == Pass::backward && !d_tensors[i].shape.empty();
    p.named.push_back({expressions.tensors[i].name, mirrors_.tensor(expressions.tensors[i]),
                       has_gradient ? mirrors_.tensor(d_tensors[i]) : Tensor()});
  }
  return p;
}

}  // namespace fovea::cli
