// A model made on the spot, to measure llama.cpp with, and its logits, to compare.
//
//   ggml_model make FILE                 random weights in the shape of Llama 3.2 1B: 16 layers, 32 query heads over 8 key
//                                        heads of 64, q8_0
//   ggml_model logits FILE TOKENS K V FA the logits of the last two of TOKENS tokens, float32, to standard output; with a cache
//                                        of the types K and V (f16, q8_0, ...), and FLASH_ATTN_EXT for attention when FA is on
#include <ggml-backend.h>
#include <ggml.h>
#include <gguf.h>
#include <llama.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr uint32_t kLayers = 16, kWidth = 2048, kHidden = 8192, kHeads = 32, kKeyHeads = 8, kHeadSize = 64,
                   kVocabulary = 128256, kContext = 32768;

struct Free {
  void operator()(ggml_context* x) const { ggml_free(x); }
  void operator()(gguf_context* x) const { gguf_free(x); }
  void operator()(llama_model* x) const { llama_model_free(x); }
  void operator()(llama_context* x) const { llama_free(x); }
};

/// Random numbers of the spread that keeps the length of vectors. Rows repeat one stretch from another place on: making more
/// of them would take longer than measuring.
void fill(ggml_tensor* t, std::mt19937& random) {
  if (t->type == GGML_TYPE_F32) {
    std::fill_n(static_cast<float*>(t->data), ggml_nelements(t), 1.0f);
    return;
  }
  constexpr int64_t kRows = 64;
  const size_t row_bytes = ggml_row_size(t->type, t->ne[0]);
  std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(t->ne[0])));
  std::vector<float> numbers(static_cast<size_t>(kRows * t->ne[0]));
  for (float& x : numbers) x = normal(random);
  std::vector<char> rows(kRows * row_bytes);
  ggml_quantize_chunk(t->type, numbers.data(), rows.data(), 0, kRows, t->ne[0], nullptr);
  const size_t blocks = rows.size() / ggml_type_size(t->type);
  for (int64_t i = 0; i < ggml_nrows(t); ++i) {
    const size_t start = random() % blocks * ggml_type_size(t->type);
    char* to = static_cast<char*>(t->data) + static_cast<size_t>(i) * row_bytes;
    const size_t first = std::min(row_bytes, rows.size() - start);
    std::memcpy(to, rows.data() + start, first);
    std::memcpy(to + first, rows.data(), row_bytes - first);
  }
}

int make(const char* path) {
  const std::unique_ptr<gguf_context, Free> file(gguf_init_empty());
  gguf_set_val_str(file.get(), "general.architecture", "llama");
  gguf_set_val_str(file.get(), "general.name", "random weights");
  gguf_set_val_u32(file.get(), "general.file_type", 7);  // mostly q8_0
  gguf_set_val_str(file.get(), "tokenizer.ggml.model", "none");
  gguf_set_val_u32(file.get(), "llama.vocab_size", kVocabulary);
  gguf_set_val_u32(file.get(), "llama.context_length", kContext);
  gguf_set_val_u32(file.get(), "llama.embedding_length", kWidth);
  gguf_set_val_u32(file.get(), "llama.block_count", kLayers);
  gguf_set_val_u32(file.get(), "llama.feed_forward_length", kHidden);
  gguf_set_val_u32(file.get(), "llama.attention.head_count", kHeads);
  gguf_set_val_u32(file.get(), "llama.attention.head_count_kv", kKeyHeads);
  gguf_set_val_u32(file.get(), "llama.rope.dimension_count", kHeadSize);
  gguf_set_val_f32(file.get(), "llama.rope.freq_base", 500000.0f);
  gguf_set_val_f32(file.get(), "llama.attention.layer_norm_rms_epsilon", 1e-5f);

  ggml_init_params params = {};
  params.mem_size = size_t{2} << 30;  // 1.3 GB of weights
  const std::unique_ptr<ggml_context, Free> context(ggml_init(params));
  std::mt19937 random(1);
  const auto add = [&](const std::string& name, int64_t in, int64_t out) {
    ggml_tensor* t = out == 0 ? ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, in)
                              : ggml_new_tensor_2d(context.get(), GGML_TYPE_Q8_0, in, out);
    ggml_set_name(t, name.c_str());
    fill(t, random);
    gguf_add_tensor(file.get(), t);
  };
  add("token_embd.weight", kWidth, kVocabulary);
  add("output_norm.weight", kWidth, 0);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const std::string block = "blk." + std::to_string(layer) + ".";
    add(block + "attn_norm.weight", kWidth, 0);
    add(block + "attn_q.weight", kWidth, kHeads * kHeadSize);
    add(block + "attn_k.weight", kWidth, kKeyHeads * kHeadSize);
    add(block + "attn_v.weight", kWidth, kKeyHeads * kHeadSize);
    add(block + "attn_output.weight", kHeads * kHeadSize, kWidth);
    add(block + "ffn_norm.weight", kWidth, 0);
    add(block + "ffn_gate.weight", kWidth, kHidden);
    add(block + "ffn_up.weight", kWidth, kHidden);
    add(block + "ffn_down.weight", kHidden, kWidth);
  }
  return gguf_write_to_file(file.get(), path, false) ? 0 : 1;
}

ggml_type type_named(const char* name) {
  for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
    const char* known = ggml_type_name(static_cast<ggml_type>(type));
    if (known != nullptr && std::strcmp(known, name) == 0) return static_cast<ggml_type>(type);
  }
  return GGML_TYPE_COUNT;
}

int logits(const char* path, int tokens, const char* type_k, const char* type_v, bool flash_attention) {
  const std::unique_ptr<llama_model, Free> model(
      llama_model_load_from_file(path, llama_model_default_params()));
  if (model == nullptr) return 1;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(tokens);
  params.n_batch = params.n_ctx;
  params.flash_attn_type = flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = type_named(type_k);
  params.type_v = type_named(type_v);
  params.n_threads = params.n_threads_batch =
      static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const std::unique_ptr<llama_context, Free> context(llama_init_from_model(model.get(), params));
  if (context == nullptr) return 1;
  std::mt19937 random(2);
  std::vector<llama_token> text(static_cast<size_t>(tokens));
  for (llama_token& token : text) token = static_cast<llama_token>(random() % kVocabulary);
  // The last token by itself, as in generation.
  if (llama_decode(context.get(), llama_batch_get_one(text.data(), tokens - 1)) != 0) return 1;
  std::fwrite(llama_get_logits_ith(context.get(), -1), sizeof(float), kVocabulary, stdout);
  if (llama_decode(context.get(), llama_batch_get_one(&text.back(), 1)) != 0) return 1;
  std::fwrite(llama_get_logits_ith(context.get(), -1), sizeof(float), kVocabulary, stdout);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  ggml_backend_load_all();
  if (command == "make" && argc == 3) return make(argv[2]);
  if (command == "logits" && argc == 7) {
    return logits(argv[2], std::atoi(argv[3]), argv[4], argv[5], std::strcmp(argv[6], "on") == 0);
  }
  std::fprintf(stderr, "ggml_model make FILE | ggml_model logits FILE TOKENS TYPE_K TYPE_V on|off\n");
  return 2;
}
