/* Which tile of the output a worker takes next: plain C, for host and device.
 *
 * A tile is `block` (a range of query rows) of one head of one batch. Heads are
 * taken in sections small enough that a section's keys and values stay in the L2
 * cache while its row blocks are done. Under a causal mask the last row blocks see
 * the most keys. Long tiles must not come last, or the others wait for them: so
 * the upper half of the row blocks of all heads goes first, section by section and
 * longest first, then the upper half of what is left, and so on down to the first
 * row block. Each time keys and values are read from memory anew, which is dear
 * where heads are short. Those go round in groups: the longest tiles of one group, the second
 * longest of the group before, and so on, so that what is read from memory is spread evenly. The
 * last heads come all together, longest first.
 * Where tiles differ in length, workers ask a counter for the next index; else they take turns, and
 * the last tiles may be cut, so that more workers have a part of them. */
#ifndef FA3_SCHEDULER_H
#define FA3_SCHEDULER_H

#ifdef __CUDACC__
#define FA3_SHARED __host__ __device__ static __forceinline__
#else
#define FA3_SHARED static inline
#endif

/* The quotient of numbers that are not negative. Most divisors of a plan are 1, and a thread of a
 * GPU takes a hundred cycles for any other. */
FA3_SHARED int fa3_divide(int a, int b) {
  return b == 1 ? a : (int)((unsigned)a / (unsigned)b);
}

typedef struct {
  int blocks; /* row blocks of a head */
  int heads;  /* heads (of queries, or of keys where query heads share tiles) */
  int batches;
  int section; /* heads, over all batches, that are in flight together */
  int uneven;  /* tiles of a head differ in length: longest first, as above; else block after block,
                  head after head */
  int group;   /* heads that are begun together, where heads are short; else 0 */
  int grouped; /* heads in such groups: whole ones */
  int packed;  /* only tiles that there are have numbers: tile_walk in forward_tiles.cuh */
  int cut;     /* how many of the last tiles are cut, */
  int parts;   /* each into so many */
} fa3_tile_space;

/* `block` counts row blocks; from space.blocks on, it counts parts of them, from the first of its
 * head. */
typedef struct {
  int block, head, batch;
} fa3_tile;

FA3_SHARED int fa3_tile_count(const fa3_tile_space *space) {
  return space->batches * space->heads * space->blocks; /* no overflow of an empty batch */
}

FA3_SHARED fa3_tile fa3_tile_at(const fa3_tile_space *space, int index) {
  const int all_heads = space->heads * space->batches;
  fa3_tile tile;
  int head;
  if (!space->uneven) {
    head = index / space->blocks;
    tile.block = index - head * space->blocks;
  } else if (index < space->grouped * space->blocks) {
    const int round_tiles = space->group * space->blocks;
    const int round = index / round_tiles, rest = index - round * round_tiles;
    const int turn = rest / space->group;
    int group = round - turn; /* groups go round: the first rounds have the rest of the last ones */
    while (group < 0) group += space->grouped / space->group;
    tile.block = space->blocks - 1 - turn;
    head = group * space->group + rest - turn * space->group;
  } else if (space->group > 0) {
    const int rest = index - space->grouped * space->blocks, width = all_heads - space->grouped;
    tile.block = space->blocks - 1 - rest / width;
    head = space->grouped + rest % width;
  } else {
    int above = space->blocks; /* this phase has the blocks from above / 2 to above - 1 */
    while (index >= (above - above / 2) * all_heads) {
      index -= (above - above / 2) * all_heads;
      above /= 2;
    }
    const int phase_blocks = above - above / 2;
    const int section_tiles = space->section * phase_blocks;
    const int section = index / section_tiles;
    const int first = section * space->section;
    const int width = all_heads - first < space->section ? all_heads - first : space->section;
    const int rest = index - section * section_tiles;
    tile.block = above - 1 - rest / width;
    head = first + rest % width;
  }
  tile.head = head % space->heads;
  tile.batch = head / space->heads;
  return tile;
}

/* As fa3_tile_count and fa3_tile_at, of whole tiles and the parts of those that are cut. */
FA3_SHARED int fa3_part_count(const fa3_tile_space *space) {
  return fa3_tile_count(space) + space->cut * (space->parts - 1);
}

FA3_SHARED fa3_tile fa3_part_at(const fa3_tile_space *space, int index) {
  const int whole = fa3_tile_count(space) - space->cut, rest = index - whole;
  fa3_tile tile = fa3_tile_at(space, rest < 0 ? index : whole + rest / space->parts);
  if (rest >= 0) tile.block = space->blocks + tile.block * space->parts + rest % space->parts;
  return tile;
}

#endif
