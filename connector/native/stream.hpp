// Copies that bypass the caches.
//
// Whoever asks for many megabytes does not find the first of them in a cache at the end anyway, and a plain store first
// reads the line that it overwrites. Measured on memfds (scattered pages of 16 KiB to 1 MiB): 1.2 to 2 times memcpy
// beyond what the caches hold, but only half of it for a few megabytes that they do hold.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

// Batches of at least this many bytes are copied with `copy_streaming`, in pieces of at least `kStreamingRunBytes`.
constexpr int64_t kStreamingBatchBytes = 8 << 20;
constexpr int64_t kStreamingRunBytes = 4 << 10;

// As memcpy. What it writes is visible to others only after `end_streaming` on the same thread.
void copy_streaming(char* destination, const char* source, size_t bytes);
void end_streaming();

}  // namespace kvferry
