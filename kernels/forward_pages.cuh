// The forward kernel's loading warps where key and value are a cache in pages: warps 0, 1 and 3.
#ifndef FA3_FORWARD_PAGES_CUH
#define FA3_FORWARD_PAGES_CUH

#include "forward_page_boxes.cuh"
#include "forward_page_rows.cuh"

// Up to head dim 128 as many of the three as there are boxes share each tile: a warp issues a copy
// in about 60 clocks, too slowly for small pages. Above, one loads K and one V.
__device__ __forceinline__ void load_boxes_of_pages(const fa3_forward_params &params,
                                                    const layout &m, int warp) {
  if constexpr (kPageLoaders == 1) {
    if (warp == 0)
      load_pages_by_boxes<true, false>(params, m, 0);
    else if (warp == 1)
      load_queries(params, m);
    else
      load_pages_by_boxes<false, true>(params, m, 0);
  } else {
    const int part = min(warp, 2);
    if (part < loading_warps(params))
      load_pages_by_boxes<true, true>(params, m, part);
    else if (warp == 1)
      load_queries(params, m);
  }
}

__device__ __forceinline__ void load_rows_of_pages(const fa3_forward_params &params,
                                                   const layout &m, int warp) {
  if (warp == 1) {
    load_queries_and_report(params, m);
  } else if constexpr (kRowLoaders == 1) {
    if (warp == 0)
      load_pages_by_rows<true, false>(params, m, 0);
    else
      load_pages_by_rows<false, true>(params, m, 0);
  } else {
    load_pages_by_rows<true, true>(params, m, min(warp, 1));
  }
}

__device__ __forceinline__ void load_pages(const fa3_forward_params &params, const layout &m,
                                           int warp) {
  if (params.box > 0)
    load_boxes_of_pages(params, m, warp);
  else
    load_rows_of_pages(params, m, warp);
}

#endif
