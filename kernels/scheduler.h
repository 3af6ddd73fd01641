/* Which tile of the output a worker takes next: plain C, for host and device.
 *
 * A tile is `block` (a range of query rows) of one head of one batch. Heads are
 * taken in sections small enough that a section's keys and values stay in the L2
 * cache while all of its row blocks are done. Under a causal mask the last row
 * blocks see the most keys, so they go first, and the short ones fill the gaps at
 * the end. Workers take turns; every second round is dealt backwards, so that who
 * got the longest tile of one round gets the shortest of the next. */
#ifndef FA3_SCHEDULER_H
#define FA3_SCHEDULER_H

#ifdef __CUDACC__
#define FA3_SHARED __host__ __device__ static __forceinline__
#else
#define FA3_SHARED static inline
#endif

typedef struct {
    int blocks;     /* row blocks of a head */
    int heads;      /* heads (of queries, or of keys where query heads are packed) */
    int batches;
    int section;    /* heads, over all batches, that are in flight together */
    int descending; /* last row block first, all heads of the section side by side */
} fa3_tile_space;

typedef struct {
    int block, head, batch;
} fa3_tile;

FA3_SHARED int fa3_tile_count(const fa3_tile_space *space)
{
    return space->blocks * space->heads * space->batches;
}

/* The tile that `worker` of `workers` takes in its `round`-th turn; an index at
 * or beyond the tile count means that it has none (and may have one no more). */
FA3_SHARED int fa3_tile_index(const fa3_tile_space *space, int worker, int workers, int round)
{
    const int turned = space->descending && (round & 1);
    return round * workers + (turned ? workers - 1 - worker : worker);
}

FA3_SHARED fa3_tile fa3_tile_at(const fa3_tile_space *space, int index)
{
    const int all_heads = space->heads * space->batches;
    const int section_tiles = space->section * space->blocks;
    const int section = index / section_tiles;
    const int first = section * space->section;
    const int width = all_heads - first < space->section ? all_heads - first : space->section;
    const int rest = index - section * section_tiles;
    const int head = first + (space->descending ? rest % width : rest / space->blocks);
    fa3_tile tile;
    tile.block = space->descending ? space->blocks - 1 - rest / width : rest % space->blocks;
    tile.head = head % space->heads;
    tile.batch = head / space->heads;
    return tile;
}

#endif
