// Memory of each rank that all others reach: steps of messages become copies from where rows lie to where they belong.
//
// A rank's window is the workspace of its plan, with words in front of it. In a step each rank tells those that copy from or to its
// window that they may (`open`), waits for the same of those whose windows it copies from or to, copies, and tells them so (`done`). Words
// hold the number of the run, so nothing has to be cleared. On GPUs streams write and await the words, and copy engines copy: the host
// does not wait, and attention keeps all SMs.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "distributed/exchange.hpp"
#include "distributed/memory.hpp"
#include "distributed/stream_watch.hpp"
#include "distributed/transport.hpp"

namespace fovea::distributed {

class Windows {
 public:
  /// With all ranks. Null on all of them where one does not reach another's window. `bytes`: of this rank's workspace.
  static std::unique_ptr<Windows> open(const Transport& transport, Memory& memory, int64_t bytes,
                                       size_t exchanges);
  Windows(const Windows&) = delete;
  Windows& operator=(const Windows&) = delete;
  /// Waits for the last run: its copies use the memory of others, and theirs this one's.
  ~Windows() { memory_.wait_for_end(); }

  char* workspace(int rank) const { return windows_[static_cast<size_t>(rank)] + first_; }
  char* own() const { return workspace(transport_.rank()); }

  static Lane lane_of(const Exchange& exchange) { return exchange.alone ? Lane::kCompute : Lane::kLink; }

  void begin_run();
  /// Begins step `number`, an exchange by copies. box_of(copy) is the box with its addresses.
  template <class BoxOf>
  void start(const Exchange& exchange, size_t number, BoxOf&& box_of) {
    tell(without(exchange.copied_by, exchange.open_to), number, kOpen, lane_of(exchange));
    exchange.alone ? copy_at_once(exchange, number, box_of) : copy_in_turn(exchange, number, box_of);
  }
  /// Ends it: what is put on the lane from now on finds what the others have copied.
  void finish(const Exchange& exchange, size_t number, Lane lane) {
    await(exchange.copied_by, number, kDone, lane);
  }
  /// Words of this rank's that say which parts (Exchange::copy_in_parts) a peer has copied here in step `number`: each comes to `run()`.
  const uint32_t* words_of_parts(size_t number, int peer) const {
    return word(transport_.rank(), number, peer, kPart);
  }
  uint32_t run() const { return run_; }
  /// What is put on the lane from now on finds a part that a peer copies.
  void finish_part(size_t number, int peer, int part, Lane lane) {
    await({peer}, number, static_cast<Kind>(kPart + static_cast<size_t>(part)), lane);
  }
  /// Whether a rank computes on the device of this one: what either copies may wait for SMs that the other holds.
  bool shares_device(int rank) const { return shares_device_[static_cast<size_t>(rank)]; }
  /// Behind all steps.
  void end_run();
  /// A run has failed on this rank: nothing waits for others any more.
  void abandon();

 private:
  enum Kind : size_t { kOpen, kDone, kPart, kKinds = kPart + kMostCopyParts };

  /// By copy engines, beside what is computed.
  template <class BoxOf>
  void copy_in_turn(const Exchange& exchange, size_t number, BoxOf&& box_of) {
    const std::vector<PeerCopy>& copies = exchange.copies;
    for (size_t i = 0; i < copies.size();) {
      const int peer = copies[i].peer;
      const bool own = peer == transport_.rank();
      if (!own) await(without({peer}, exchange.open_at), number, kOpen, Lane::kLink);
      for (; i < copies.size() && copies[i].peer == peer; ++i) {
        memory_.copy(box_of(copies[i]), bytes_of(copies[i].type), Lane::kLink);
        if (const int part = copies[i].ends_part; part >= 0)
          tell({peer}, number, static_cast<Kind>(kPart + static_cast<size_t>(part)), Lane::kLink);
      }
      if (!own) tell({peer}, number, kDone, Lane::kLink);
    }
  }
  /// By SMs, which have nothing else to do: to and from all at once, faster than a copy engine.
  template <class BoxOf>
  void copy_at_once(const Exchange& exchange, size_t number, BoxOf&& box_of) {
    std::vector<int> peers;
    std::vector<std::pair<fovea_dtype, std::vector<Box>>> boxes;
    for (const PeerCopy& copy : exchange.copies) {
      if (copy.peer != transport_.rank() && (peers.empty() || peers.back() != copy.peer))
        peers.push_back(copy.peer);
      const auto same = [&](const auto& of) { return of.first.bits == copy.type.bits; };
      auto found = std::find_if(boxes.begin(), boxes.end(), same);
      if (found == boxes.end()) found = boxes.insert(boxes.end(), {copy.type, {}});
      if (copy.bytes() > 0) found->second.push_back(box_of(copy));
    }
    await(without(peers, exchange.open_at), number, kOpen, Lane::kCompute);
    for (const auto& [type, of_type] : boxes) memory_.copy_at_once(of_type, type, Lane::kCompute);
    tell(peers, number, kDone, Lane::kCompute);
  }

  Windows(const Transport& transport, Memory& memory, size_t exchanges);
  static std::vector<int> without(std::vector<int> peers, const std::vector<int>& others);
  uint32_t* word(int of, size_t number, int about, Kind kind) const;
  void tell(const std::vector<int>& peers, size_t number, Kind kind, Lane lane);
  void await(const std::vector<int>& peers, size_t number, Kind kind, Lane lane);
  /// A run is late: streams get past its waits, and the transport stops.
  void give_up(size_t runs_done);
  std::string late_ranks(uint32_t run, const std::vector<uint32_t>& words) const;

  Transport transport_;
  Memory& memory_;
  size_t words_;
  int64_t first_;  ///< bytes in front of the workspace
  std::vector<std::shared_ptr<void>> shared_;
  std::vector<char*> windows_;       ///< by rank
  std::vector<bool> shares_device_;  ///< by rank
  uint32_t run_ = 0;
  std::chrono::steady_clock::time_point begun_;
  mutable std::mutex mutex_;
  std::string failure_;
  std::unique_ptr<StreamWatch> watch_;  // the last member: its thread uses the others
};

}  // namespace fovea::distributed
