// Where rows of a sequence are in a cache in pages: for the forward kernels' loading warps, whose
// every instruction is one less for the consumers beside them.
#ifndef FA3_FORWARD_PAGE_CURSOR_CUH
#define FA3_FORWARD_PAGE_CURSOR_CUH

// A number of rows as whole pages and rows beyond them.
struct page_step {
  int entries, rows;
};

__device__ __forceinline__ page_step make_page_step(unsigned rows, unsigned page_size) {
  return {(int)(rows / page_size), (int)(rows % page_size)};
}

// A key of a sequence, its entry in the page table and its row in that page. It moves without a
// division.
struct page_cursor {
  int key, entry, row;
};

__device__ __forceinline__ page_cursor find_cursor(unsigned page_size, int first_row, int key) {
  const unsigned at = max(first_row + key, 0), entry = at / page_size;
  return {key, (int)entry, (int)(at - entry * page_size)};
}

__device__ __forceinline__ void move_forward(page_cursor &cursor, int keys, const page_step &step,
                                             int page_size) {
  cursor.key += keys;
  cursor.entry += step.entries;
  cursor.row += step.rows;
  if (cursor.row >= page_size) {
    cursor.row -= page_size;
    ++cursor.entry;
  }
}

__device__ __forceinline__ void move_back(page_cursor &cursor, int keys, const page_step &step,
                                          int page_size) {
  cursor.key -= keys;
  cursor.entry -= step.entries;
  cursor.row -= step.rows;
  if (cursor.row < 0) {
    cursor.row += page_size;
    --cursor.entry;
  }
}

// Its page, or -1 beside the sequence's keys. To be called early: the table is far away.
__device__ __forceinline__ int look_up(const int *table, int keys, const page_cursor &cursor) {
  return (unsigned)cursor.key < (unsigned)keys ? __ldg(table + cursor.entry) : -1;
}

#endif
