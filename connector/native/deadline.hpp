// When a batch has to be over, and how its lateness is told.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace kvferry {

using Clock = std::chrono::steady_clock;

// So far away that adding it to now overflows nothing; as good as no deadline at all.
constexpr double kLongestS = 1e9;

// Throws std::invalid_argument unless `seconds` is positive.
inline Clock::time_point after(double seconds) {
  if (!(seconds > 0)) throw std::invalid_argument("a timeout must be a positive number of seconds");
  const std::chrono::duration<double> bounded(std::min(seconds, kLongestS));
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(bounded);
}

inline std::string lateness(int64_t batch, bool write, int64_t bytes, double timeout_s) {
  std::ostringstream text;
  text << "batch " << batch << " (a " << (write ? "write" : "read") << " of " << bytes << " bytes) was not over within "
       << timeout_s << " s";
  return text.str();
}

}  // namespace kvferry
