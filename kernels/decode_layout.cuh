// Where things are in the shared memory of a decode kernel's block.
#ifndef FA3_DECODE_LAYOUT_CUH
#define FA3_DECODE_LAYOUT_CUH

#include "decode_deal.cuh"

static_assert(kUnitKeys == FA3_DECODE_KEYS && kWarps % kUnitWarps == 0, "a step of each warp");
constexpr int kThreads = 32 * kWarps;

// Behind a warp's ring: its queries, where registers have no room for them.
constexpr bool kSharedQueries = kElementBytes == 1 && kHeadDim > 128 && kRows > 8;
constexpr int kWarpBytes = kRingBytes + (kSharedQueries ? kRows * kHeadDim * 2 : 0);

// When its keys are done, a warp's output, in floats, takes the place of its ring. The pitch keeps
// rows in different banks.
constexpr int kPitch = kHeadDim + 4;
static_assert(kRows * kPitch * 4 <= kWarpBytes, "room for the output");

// Shared memory, in bytes.
constexpr int kTopAt = kWarps * kWarpBytes;             // [warp][row], floats
constexpr int kSumAt = kTopAt + kWarps * kRows * 4;     // likewise
constexpr int kResultAt = kSumAt + kWarps * kRows * 4;  // [row]: the block's top and sum
// What the other blocks of a cluster send: quads of columns of the rows that this block puts
// together, and each block's tops and sums.
static_assert(kRows * kQuads <= 1 << 12, "owner_of is exact");
constexpr int kReceivedAt = kResultAt + kRows * 8;
constexpr int kReceivedResultsAt = kReceivedAt + (kRows * kQuads + FA3_DECODE_MAX_CLUSTER) * 16;
constexpr int kReceived = kReceivedResultsAt + FA3_DECODE_MAX_CLUSTER * kRows * 8;  // the barrier
// What the block does, where registers have no room for it meanwhile.
constexpr bool kSharedWork = kElementBytes == 1 || kHeadDim > 128;
constexpr int kWorkAt = kReceived + 8;
constexpr int kWorkBytes = 96;
constexpr int kDealAt = (kWorkAt + kWorkBytes + 15) / 16 * 16;  // what is left to do
constexpr int kDealBytes = deal_bytes(kWarps);
// Queries that are turned here (decode_append.cuh).
constexpr bool kMayAppend = kElementBytes == 2 && FA3_DECODE_MAY_APPEND(kRows, kHeadDim);
constexpr int kTurnedBarrierAt = kDealAt + kDealBytes;
constexpr int kTurnedAt = (kTurnedBarrierAt + 8 + 127) / 128 * 128;
constexpr int kSharedBytes = kMayAppend ? kTurnedAt + kRows * kRowBytes : kDealAt + kDealBytes;
constexpr int kTilesInRing = kHeads * kLoads * kStages;  // of keys
constexpr int kSharedBytesByHost =
    kElementBytes == 1 ? FA3_DECODE_FP8_SHARED_BYTES(kWarps, kRows, kHeadDim, kTilesInRing)
                       : FA3_DECODE_SHARED_BYTES(kRows, kHeadDim, kStages);
static_assert(kSharedBytes <= kSharedBytesByHost, "shared memory");
static_assert(sizeof(work) <= kWorkBytes, "room for it");

#endif
