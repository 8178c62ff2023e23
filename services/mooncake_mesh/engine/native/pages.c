/* Copies of K and V between the pages of an arena and rows. */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* One token's K or V of one head; `bytes` is a multiple of 64. */
INLINE void copy_head(char *to, const char *from, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += 64)
        memcpy(to + at, from + at, 64);
}

/* Positions start to end of one sequence, between its pages and rows, of n_layers layers from first_layer on.
 *
 * pages: (blocks, layers, K or V, block_tokens, kv_heads, head), a block being block_bytes and its layer layer_bytes.
 * blocks: those of the sequence from the one that holds `start` on. rows: strides[] bytes between layers, K and V, heads
 * and positions.
 */
void copy_pages(char *pages, int64_t block_bytes, int64_t layer_bytes, int64_t block_tokens, const int64_t *blocks,
                char *rows, const int64_t *strides, int64_t first_layer, int64_t n_layers, int64_t start, int64_t end,
                int64_t kv_heads, int64_t head_bytes, int to_pages)
{
    const int64_t token_bytes = kv_heads * head_bytes, first_block = start / block_tokens;
    for (int64_t layer = 0; layer < n_layers; layer++)
        for (int64_t position = start; position < end;) {
            const int64_t index = position / block_tokens, offset = position % block_tokens;
            const int64_t left = end - position, n = left < block_tokens - offset ? left : block_tokens - offset;
            char *page = pages + blocks[index - first_block] * block_bytes + (first_layer + layer) * layer_bytes;
            for (int64_t side = 0; side < 2; side++)
                for (int64_t head = 0; head < kv_heads; head++) {
                    char *cell = page + (side * block_tokens + offset) * token_bytes + head * head_bytes;
                    char *row = rows + layer * strides[0] + side * strides[1] + head * strides[2]
                                + (position - start) * strides[3];
                    if (to_pages)
                        for (int64_t i = 0; i < n; i++)
                            copy_head(cell + i * token_bytes, row + i * strides[3], head_bytes);
                    else
                        for (int64_t i = 0; i < n; i++)
                            copy_head(row + i * strides[3], cell + i * token_bytes, head_bytes);
                }
            position += n;
        }
}
