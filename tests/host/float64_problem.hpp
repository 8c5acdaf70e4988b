// A problem of the oracle that owns its tensors, all compact and in float64 (also those that are float32 in the C
// ABI).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/problem.hpp"
#include "cpu/reference.hpp"
#include "expr/pair_expressions.hpp"
#include "expr/parse.hpp"

namespace fovea::testing {

class Float64Problem {
 public:
  AttentionProblem problem;
  uint64_t seed = 11, offset = 3;

  /// Sets sizes and makes q, k, v, d_o, dlse (normal numbers) and all outputs.
  Float64Problem(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t heads_q, int64_t heads_kv,
                 int64_t head_dim, int64_t head_dim_v) {
    problem.dtype = DType::kF64;
    problem.batch = batch;
    problem.seqlen_q = seqlen_q;
    problem.seqlen_k = seqlen_k;
    problem.total_q = batch * seqlen_q;
    problem.total_k = batch * seqlen_k;
    problem.heads_q = heads_q;
    problem.heads_kv = heads_kv;
    problem.head_dim = head_dim;
    problem.head_dim_v = head_dim_v;
    problem.scale = 0.6;
    add_rows();
  }

  /// Turns the problem into a packed one: the sequences have the lengths given, `spare_rows` rows follow the last.
  void pack(const std::vector<int32_t>& lengths_q, const std::vector<int32_t>& lengths_k,
            int32_t spare_rows) {
    problem.packed = problem.packed_k = true;
    problem.batch = static_cast<int64_t>(lengths_q.size());
    const auto cumulate = [&](Role role, const std::vector<int32_t>& lengths) {
      std::vector<int32_t> cu{0};
      for (const int32_t length : lengths) cu.push_back(cu.back() + length);
      add_integers(role, cu);
      return int64_t{cu.back()} + spare_rows;
    };
    problem.total_q = cumulate(Role::kCuSeqlensQ, lengths_q);
    problem.total_k = cumulate(Role::kCuSeqlensK, lengths_k);
    problem.seqlen_q = *std::max_element(lengths_q.begin(), lengths_q.end());
    problem.seqlen_k = *std::max_element(lengths_k.begin(), lengths_k.end());
    add_rows();
  }

  /// A compact tensor of normal numbers; a size of 1 broadcasts.
  std::vector<double>& add(Role role, const std::vector<int64_t>& shape) {
    TensorDesc& t = problem.tensors[index_of(role)];
    t.present = true;
    t.dtype = DType::kF64;
    t.ndim = static_cast<int>(shape.size());
    int64_t count = 1;
    for (size_t axis = shape.size(); axis-- > 0;) {
      t.shape[axis] = shape[axis];
      t.stride[axis] = shape[axis] == 1 ? 0 : count;
      count *= shape[axis];
    }
    std::vector<double>& values = reals_[role];
    values.resize(static_cast<size_t>(count));
    for (double& x : values) x = normal_(generator_);
    return values;
  }
  /// A compact tensor of bytes, each nonzero with the probability given.
  std::vector<uint8_t>& add_mask(Role role, const std::vector<int64_t>& shape, double share_of_ones) {
    add(role, shape);
    const size_t count = reals_[role].size();
    reals_.erase(role);
    problem.tensors[index_of(role)].dtype = DType::kBool;
    std::vector<uint8_t>& values = bytes_[role];
    std::bernoulli_distribution one(share_of_ones);
    for (size_t x = 0; x < count; ++x) values.push_back(one(generator_) ? 1 : 0);
    return values;
  }
  void add_integers(Role role, const std::vector<int32_t>& values) {
    TensorDesc& t = problem.tensors[index_of(role)];
    t.present = true;
    t.dtype = DType::kI32;
    t.ndim = 1;
    t.shape[0] = static_cast<int64_t>(values.size());
    t.stride[0] = 1;
    integers_[role] = values;
  }

  /// Lists of keys, compact; a size of 1 broadcasts.
  void add_lists(const std::vector<int64_t>& shape, const std::vector<int32_t>& lists) {
    add(Role::kKeys, shape);
    reals_.erase(Role::kKeys);
    problem.tensors[index_of(Role::kKeys)].dtype = DType::kI32;
    problem.list_size = shape.back();
    integers_[Role::kKeys] = lists;
  }

  /// A compact float32 tensor of normal numbers for expressions, with a gradient. A size of 1 stands for all where `broadcast`
  /// has its bit, as validation leaves it.
  std::vector<float>& add_named(const std::string& name, const std::vector<int64_t>& shape,
                                int broadcast = 0) {
    NamedTensor named{name, named_desc(DType::kF32, shape, broadcast), {}};
    named.gradient = named.tensor;
    problem.named.push_back(named);
    std::vector<float>& values = named_[problem.named.size() - 1];
    values.resize(static_cast<size_t>(count_of(shape)));
    for (float& x : values) x = static_cast<float>(normal_(generator_));
    named_gradients_[problem.named.size() - 1].resize(values.size());
    return values;
  }
  void add_named_integers(const std::string& name, const std::vector<int64_t>& shape,
                          const std::vector<int32_t>& values) {
    problem.named.push_back({name, named_desc(DType::kI32, shape, 0), {}});
    named_integers_[problem.named.size() - 1] = values;
  }
  /// After its tensors.
  void set_expressions(const std::string& score, const std::string& sees = "") {
    std::vector<expr::TensorDeclaration> declarations;
    for (const NamedTensor& named : problem.named)
      declarations.push_back({named.name, named.tensor.dtype, named.tensor.ndim});
    auto expressions = std::make_shared<expr::PairExpressions>();
    if (!score.empty())
      expressions->score = std::get<expr::Expression>(expr::parse(score, expr::Use::kScore, declarations));
    if (!sees.empty())
      expressions->sees = std::get<expr::Expression>(expr::parse(sees, expr::Use::kSees, declarations));
    problem.expressions = std::move(expressions);
  }
  std::map<size_t, std::vector<float>>& named() { return named_; }
  const std::vector<float>& named_gradient(size_t i) const { return named_gradients_.at(i); }

  std::vector<double>& operator[](Role role) { return reals_.at(role); }

  void run(Pass pass) {
    problem.pass = pass;
    Buffers buffers;
    buffers.seed = seed;
    buffers.offset = offset;
    for (auto& [role, values] : reals_) buffers.data[index_of(role)] = values.data();
    for (auto& [role, values] : bytes_) buffers.data[index_of(role)] = values.data();
    for (auto& [role, values] : integers_) buffers.data[index_of(role)] = values.data();
    for (auto& [i, values] : named_) buffers.data[place_of_named(i)] = values.data();
    for (auto& [i, values] : named_integers_) buffers.data[place_of_named(i)] = values.data();
    for (auto& [i, values] : named_gradients_) buffers.data[place_of_gradient(i)] = values.data();
    cpu::run_reference(problem, buffers);
  }

 private:
  static int64_t count_of(const std::vector<int64_t>& shape) {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  }
  static TensorDesc named_desc(DType dtype, const std::vector<int64_t>& shape, int broadcast) {
    TensorDesc t;
    t.present = true;
    t.dtype = dtype;
    t.ndim = static_cast<int>(shape.size());
    int64_t count = 1;
    for (size_t axis = shape.size(); axis-- > 0;) {
      const bool for_all = (broadcast >> axis & 1) != 0;
      t.shape[axis] = for_all ? 0x7fffffff : shape[axis];
      t.stride[axis] = for_all ? 0 : count;
      count *= shape[axis];
    }
    return t;
  }

  void add_rows() {
    const auto& p = problem;
    const bool packed = p.packed;
    const auto rows = [&](Role role, int64_t seqlen, int64_t total, int64_t heads, int64_t size) {
      add(role, {packed ? 1 : p.batch, packed ? total : seqlen, heads, size});
    };
    for (const Role role : {Role::kQ, Role::kDQ}) rows(role, p.seqlen_q, p.total_q, p.heads_q, p.head_dim);
    for (const Role role : {Role::kK, Role::kDK}) rows(role, p.seqlen_k, p.total_k, p.heads_kv, p.head_dim);
    for (const Role role : {Role::kV, Role::kDV}) rows(role, p.seqlen_k, p.total_k, p.heads_kv, p.head_dim_v);
    for (const Role role : {Role::kO, Role::kDO}) rows(role, p.seqlen_q, p.total_q, p.heads_q, p.head_dim_v);
    for (const Role role : {Role::kLse, Role::kDLse}) {
      add(role, {packed ? 1 : p.batch, p.heads_q, packed ? p.total_q : p.seqlen_q});
    }
  }

  std::mt19937_64 generator_{2024};
  std::normal_distribution<double> normal_;
  std::map<Role, std::vector<double>> reals_;
  std::map<Role, std::vector<uint8_t>> bytes_;
  std::map<Role, std::vector<int32_t>> integers_;
  std::map<size_t, std::vector<float>> named_, named_gradients_;  ///< by place among the named tensors
  std::map<size_t, std::vector<int32_t>> named_integers_;
};

}  // namespace fovea::testing
