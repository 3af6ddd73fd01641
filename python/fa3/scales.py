"""Scales of FP8 caches, from the official functions' form to that of fa3.h."""

import torch

from fa3.operators import is_watched, need_tensors


def scales_of_pages(name, scale, cache, page_table, lengths, page):
    """A scale for each page, (pages, heads), of one for each sequence's head. Sequences that share
    `page`, as a message calls it, need the same; a GPU's are not looked at."""
    batch = page_table.shape[:1]
    if page_table.dim() != 2 or (lengths is not None and lengths.shape != batch):
        return scale  # The call says what is wrong with those.
    pages, page_size = cache.shape[:2]
    if scale.shape[0] not in (1, *batch):
        raise ValueError(f"{name}.shape[0] is {scale.shape[0]}: expected {batch[0]}, the batch")
    if scale.shape[0] and scale.stride(0) == 0:  # all sequences have the same: kernels are faster
        return scale[:1].expand(pages, -1)
    if lengths is not None:
        # Entries of the table past a sequence's length may be anything.
        first_row = torch.arange(page_table.shape[1], device=cache.device) * page_size
        page_table = page_table.masked_fill(first_row >= lengths[:, None], pages)
    of_pages = scale.new_ones(pages + 1, scale.shape[1])
    # What is no page goes into the row that is left out; the call says that it is none.
    index = page_table.long().clamp(-1, pages)
    of_pages[index] = scale[:, None]
    if scale.device.type == "cpu" and not is_watched():
        differs = (of_pages[index] != scale[:, None]) & ~scale.isnan()[:, None]
        if (differs & ((index >= 0) & (index < pages))[..., None]).any():
            raise ValueError(f"{name} differs between sequences that share {page}: expected one scale")
    return of_pages[:pages]


def place_scales(options, k_cache, v_cache, lengths):
    """The scales of FP8 caches as fa3.h has them: (batch, heads_k) as the official function's, or
    (entries or pages, heads_k, blocks), where a block of an entry's or a page's rows has one. Where
    scale_rows has said how many rows a block is, they are so already."""
    for name, cache in (("key_scale", k_cache), ("value_scale", v_cache)):
        scale = options.get(name)
        # What is no cache the call refuses.
        if scale is None or f"{name}_rows" in options or cache.dim() != 4:
            continue
        need_tensors(**{name: scale})
        if scale.dim() == 3:
            # No divmod, which torch.compile does not know of symbolic sizes.
            rows = cache.shape[1] // max(scale.shape[2], 1)
            if not rows or rows * scale.shape[2] != cache.shape[1]:
                raise ValueError(
                    f"{name} has {scale.shape[2]} blocks: expected a divisor of the {cache.shape[1]} "
                    "rows of a cache's entry or page"
                )
            options[f"{name}_rows"] = rows
        elif scale.dim() == 2 and "page_table" in options:
            table = options["page_table"]
            options[name] = scales_of_pages(name, scale, cache, table, lengths, "a page")
        elif scale.dim() == 2 and "cache_batch_index" in options:
            # An entry is the one page that its sequences have.
            table = options["cache_batch_index"][..., None]
            options[name] = scales_of_pages(name, scale, cache, table, lengths, "an entry of the cache")
