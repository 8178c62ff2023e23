/* What a team of OpenMP threads computes together: each thread that calls one of these does its share, and leaves it
 * when all are done. A thread in no team does everything. Results do not depend on the size of the team.
 *
 * OpenMP is torch's own: nothing is linked here, so both share one team of threads.
 */
#ifndef MOONCAKE_TEAM_H
#define MOONCAKE_TEAM_H

#include "vectors.h"

/* rows.c */
void rms_norm_share(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t size, float eps);
void rotate_share(bf16 *x, const bf16 *cos, const bf16 *sin, int64_t rows, int64_t row_stride, int64_t heads,
                  int64_t head_dim);

/* token_attention.c: see token_attention. */
typedef struct {
    const bf16 *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    bf16 *out;
    const int64_t *contexts, *capacities, *positions;
    int64_t batch, kv_heads, groups, head_dim;
} Tokens;

void token_attention_share(const Tokens *tokens, int64_t layer, int64_t window, float scaling);

/* chunk_attention.c: attention of `tokens` queries behind `start` positions, each over all up to its own, or the last
 * `window` of these.
 *
 * q: (tokens, kv_heads * groups, head_dim), tokens q_stride elements apart; k and v: (kv_heads, .., head_dim), heads
 * k_stride and v_stride apart; head_dim a multiple of 64. out: (tokens, kv_heads * groups, head_dim).
 * room: for V of all positions, rounded up to 64, in another order. */
typedef struct {
    const bf16 *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    bf16 *out;
    int64_t tokens, start, kv_heads, groups, head_dim, window;
    float scaling;
} Chunk;

void chunk_attention_share(const Chunk *chunk, uint32_t *room);

/* products.c: rows (m, inner) times weights (columns, inner), packed, as out (m, columns).
 *
 * bias (columns, rounded up to whole panels) and summands (m, columns) are added unless NULL; out may be summands. With
 * `gated` a panel's columns are 16 of a gate and 16 that it lets through: out (m, columns / 2) is SiLU of the one times
 * the other. */
typedef struct {
    const bf16 *rows;
    const uint32_t *weights;
    const bf16 *bias, *summands;
    bf16 *out;
    int64_t m, columns, inner;
    int gated;
} Product;

void multiply_share(const Product *product);

#endif
