// The definitions of windows.hpp.
#include "distributed/windows.hpp"

#include <algorithm>
#include <utility>

#include "core/status.hpp"
#include "distributed/agreement.hpp"

namespace fovea::distributed {
namespace {

/// What words become where a run is given up: past the numbers of all runs that wait, by less than half of all numbers.
constexpr uint32_t kGivenUp = uint32_t{1} << 30;

}  // namespace

Windows::Windows(const Transport& transport, Memory& memory, size_t exchanges)
    : transport_(transport),
      memory_(memory),
      words_(exchanges * static_cast<size_t>(transport.size()) * kKinds),
      first_(aligned(static_cast<int64_t>(words_ * sizeof(uint32_t)))) {}

std::unique_ptr<Windows> Windows::open(const Transport& transport, Memory& memory, int64_t bytes,
                                       size_t exchanges) {
  std::unique_ptr<Windows> made(new Windows(transport, memory, exchanges));
  const auto own = static_cast<size_t>(transport.rank());
  SharedPlace place;
  std::shared_ptr<void> mine = memory.share(static_cast<size_t>(made->first_ + bytes), place);
  const std::vector<SharedPlace> places = told_by_all(transport, memory, place);
  int32_t reached = 1;
  for (size_t rank = 0; rank < places.size(); ++rank) {
    made->shared_.push_back(rank == own ? mine : memory.reach(places[rank]));
    made->windows_.push_back(static_cast<char*>(made->shared_.back().get()));
    made->shares_device_.push_back(memory.is_of_this_device(places[rank]));
    if (made->windows_.back() == nullptr) reached = 0;
  }
  const std::vector<int32_t> all = told_by_all(transport, memory, reached);
  if (std::find(all.begin(), all.end(), 0) != all.end()) return nullptr;
  if (transport.device().type == FOVEA_CUDA)
    made->watch_ = std::make_unique<StreamWatch>(transport.device().id, transport.deadline(),
                                                 [w = made.get()](size_t done) { w->give_up(done); });
  return made;
}

std::vector<int> Windows::without(std::vector<int> peers, const std::vector<int>& others) {
  std::erase_if(peers,
                [&](int peer) { return std::find(others.begin(), others.end(), peer) != others.end(); });
  return peers;
}

uint32_t* Windows::word(int of, size_t number, int about, Kind kind) const {
  const size_t ranks = windows_.size();
  return reinterpret_cast<uint32_t*>(windows_[static_cast<size_t>(of)]) +
         (number * ranks + static_cast<size_t>(about)) * kKinds + kind;
}

void Windows::begin_run() {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw RequestError(Status::kInternal, "transport", "transport: " + failure_);
  }
  transport_.ask();
  ++run_;
  begun_ = std::chrono::steady_clock::now();
}

void Windows::end_run() {
  memory_.end();
  if (watch_) watch_->add(memory_.stream(Lane::kCompute));
}

void Windows::abandon() {
  memory_.take_over(word(transport_.rank(), 0, 0, kOpen), words_, run_ + kGivenUp);
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = "a run has failed on this rank";
}

void Windows::tell(const std::vector<int>& peers, size_t number, Kind kind, Lane lane) {
  std::vector<uint32_t*> words;
  for (const int peer : peers) words.push_back(word(peer, number, transport_.rank(), kind));
  memory_.tell(words, run_, lane);
}

void Windows::await(const std::vector<int>& peers, size_t number, Kind kind, Lane lane) {
  std::vector<uint32_t*> words;
  for (const int peer : peers) words.push_back(word(transport_.rank(), number, peer, kind));
  memory_.await(words, run_, lane, [&] {
    transport_.ask();
    if (transport_.deadline().count() == 0 ||
        std::chrono::steady_clock::now() - begun_ <= transport_.deadline())
      return;
    for (size_t i = 0; i < peers.size(); ++i) {
      if (has_come(memory_.take_over(words[i], 1, 0)[0], run_)) continue;
      throw RequestError(Status::kInternal, "transport",
                         "transport: rank " + std::to_string(peers[i]) + " did not come to a step within " +
                             std::to_string(transport_.deadline().count()) + " ms");
    }
  });
}

/// Of each rank the last step to which it has come is known by its words; those of the others are ahead.
std::string Windows::late_ranks(uint32_t run, const std::vector<uint32_t>& words) const {
  const size_t ranks = windows_.size();
  std::vector<size_t> come(ranks, 0);
  for (size_t i = 0; i < words.size(); ++i) {
    if (has_come(words[i], run)) ++come[i / kKinds % ranks];
  }
  const auto own = static_cast<size_t>(transport_.rank());
  size_t least = ~size_t{0};
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (rank != own) least = std::min(least, come[rank]);
  }
  std::string names;
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (rank != own && come[rank] == least) names += (names.empty() ? "rank " : ", ") + std::to_string(rank);
  }
  return names;
}

void Windows::give_up(size_t runs_done) {
  auto* const words = word(transport_.rank(), 0, 0, kOpen);
  const auto done = static_cast<uint32_t>(runs_done);
  const std::string reason = "copies of a run did not arrive within " +
                             std::to_string(transport_.deadline().count()) + " ms; " +
                             late_ranks(done + 1, memory_.take_over(words, words_, 0)) + " is gone, or late";
  {
    const std::lock_guard lock(mutex_);
    failure_ = reason;
  }
  transport_.stop("rank " + std::to_string(transport_.rank()) + ": " + reason);
  // Last: who finds streams past the run finds out that it failed.
  memory_.take_over(words, words_, done + kGivenUp);
}

}  // namespace fovea::distributed
