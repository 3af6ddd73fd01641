// setmaxnreg: three warpgroups begin with 168 registers a thread. The first gives back all but
// 24, but only after 20,000 clocks; the other two ask for 240 at once, and have to wait for it.
#include "registers.cuh"
#include "tools.cuh"

constexpr int kWait = 20000;

static __global__ void __launch_bounds__(384, 1) share_out(int64_t *asked, int64_t *done) {
  const int warpgroup = threadIdx.x / 128;
  __syncthreads();
  const int64_t begin = clock64();
  if (warpgroup == 0) {
    while (clock64() - begin < kWait) {
    }
    asked[warpgroup] = clock64() - begin;
    registers_give_back<24>();
  } else {
    asked[warpgroup] = clock64() - begin;
    registers_take<240>();
  }
  done[warpgroup] = clock64() - begin;
}

int main(void) {
  array<int64_t> asked = make_array<int64_t>(3), done = make_array<int64_t>(3);
  cudaFuncAttributes attributes;
  CUDA(cudaFuncGetAttributes(&attributes, share_out));
  for (int i = 0; i < 2; ++i) share_out<<<1, 384>>>(asked.device, done.device);
  to_host(asked);
  to_host(done);
  printf("registers a thread at the start: %d\n", attributes.numRegs);
  for (int i = 0; i < 3; ++i)
    printf("warpgroup %d: %s at clock %5lld, done at %lld\n", i,
           i == 0 ? "gives back to 24" : "asks for 240    ", (long long)asked.host[i],
           (long long)done.host[i]);
  expect(attributes.numRegs == 168, "the registers at the start");
  expect(done.host[1] >= kWait && done.host[2] >= kWait, "nobody has what was not given back");
  return 0;
}
