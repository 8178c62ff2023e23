/* Attention of one token of each of several sequences. */
#include "team.h"

enum { POSITIONS = 64, MAX_GROUPS = 16 }; /* positions whose scores are worked out at a time: they fit the first cache */

typedef struct {
    float most;                  /* the greatest score so far, and what is relative to it: */
    floats total;                /* the sums of exponentials, in sixteen parts */
    floats mixed[MAX_VECTORS];   /* the values, weighed by them */
} Attended;

INLINE floats pairs(floats a, floats b) /* sums of neighbours: eight of a, then eight of b */
{
    const ints even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

/* Scores of sixteen keys (16, head_dim) in order, for one query. */
INLINE floats sixteen_scores(const floats *q, const floats *keys, const int vectors)
{
    floats dots[LANES];
    for (int p = 0; p < LANES; p++) {
        dots[p] = q[0] * keys[p * vectors];
        for (int i = 1; i < vectors; i++)
            dots[p] += q[i] * keys[p * vectors + i];
    }
    for (int n = LANES; n > 1; n /= 2)
        for (int i = 0; i < n; i += 2)
            dots[i / 2] = pairs(dots[i], dots[i + 1]);
    return dots[0];
}

INLINE void widen(floats *to, const bf16 *from, int n, int padded, const int vectors)
{
    for (int i = 0; i < n * vectors; i++) {
        to[i] = load(from + i * LANES);
        if (i % 2 == 0)
            __builtin_prefetch(from + (POSITIONS * vectors + i) * LANES);
    }
    for (int i = n * vectors; i < padded * vectors; i++)
        to[i] = all(0);
}

/* Queries of one kv head over positions [first, end) of its k and v (position, head_dim). `vectors` is a constant wherever
 * this is inlined. */
INLINE void attend(const bf16 *queries, const bf16 *k, const bf16 *v, bf16 *out, int groups, int64_t first, int64_t end,
                   float scaling, const int vectors)
{
    const int head_dim = vectors * LANES;
    const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    floats q[MAX_GROUPS * vectors], wide[POSITIONS * vectors], scores[MAX_GROUPS][POSITIONS / LANES];
    Attended attended[MAX_GROUPS];
    for (int g = 0; g < groups; g++) {
        attended[g].most = -INFINITY;
        attended[g].total = all(0);
        for (int i = 0; i < vectors; i++) {
            q[g * vectors + i] = load(queries + (g * vectors + i) * LANES) * scaling;
            attended[g].mixed[i] = all(0);
        }
    }
    for (int64_t at = first; at < end; at += POSITIONS) {
        const int n = end - at < POSITIONS ? end - at : POSITIONS;
        const int parts = (n + LANES - 1) / LANES;
        widen(wide, k + at * head_dim, n, parts * LANES, vectors);
        for (int g = 0; g < groups; g++) {
            Attended *a = attended + g;
            floats top = all(a->most);
            for (int i = 0; i < parts; i++) {
                floats s = sixteen_scores(q + g * vectors, wide + i * LANES * vectors, vectors);
                if (i * LANES + LANES > n)
                    s = choose(lane < (n - i * LANES) - (ints){}, s, all(-INFINITY));
                scores[g][i] = s;
                top = choose(s > top, s, top);
            }
            const float most = greatest(top);
            const float shrink = expf(a->most - most);
            a->most = most;
            a->total *= shrink;
            for (int i = 0; i < vectors; i++)
                a->mixed[i] *= shrink;
            for (int i = 0; i < parts; i++) {
                scores[g][i] = exp_of(scores[g][i] - most);
                a->total += scores[g][i];
            }
        }
        widen(wide, v + at * head_dim, n, n, vectors);
        for (int g = 0; g < groups; g++) {
            const float *weights = (const float *)scores[g];
            floats even[MAX_VECTORS], odd[MAX_VECTORS]; /* two sums, or each product would wait for the last */
            for (int i = 0; i < vectors; i++)
                even[i] = attended[g].mixed[i], odd[i] = all(0);
            for (int p = 0; p + 1 < n; p += 2)
                for (int i = 0; i < vectors; i++) {
                    even[i] += weights[p] * wide[p * vectors + i];
                    odd[i] += weights[p + 1] * wide[(p + 1) * vectors + i];
                }
            for (int i = 0; i < vectors; i++) {
                if (n % 2)
                    even[i] += weights[n - 1] * wide[(n - 1) * vectors + i];
                attended[g].mixed[i] = even[i] + odd[i];
            }
        }
    }
    for (int g = 0; g < groups; g++) {
        const float share = 1.0f / sum(attended[g].total);
        for (int i = 0; i < vectors; i++)
            store(out + (g * vectors + i) * LANES, attended[g].mixed[i] * share);
    }
}

/* K and V of one new token of each sequence go to its place in the sequence's context, and its queries attend over the
 * context up to there.
 *
 * q, k, v: (batch, heads or kv_heads, head_dim), rows `*_stride` elements apart. out: (batch, heads, head_dim).
 * contexts: addresses of (layers, K or V, kv_heads, capacity, head_dim). A token sees `window` positions, its own among them;
 * 0 for all.
 */
void token_attention_share(const Tokens *tokens, int64_t layer, int64_t window, float scaling)
{
    const int64_t kv_heads = tokens->kv_heads, groups = tokens->groups, head_dim = tokens->head_dim;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tokens->batch * kv_heads; task++) {
        const int64_t b = task / kv_heads, h = task % kv_heads, position = tokens->positions[b];
        const int64_t head_size = tokens->capacities[b] * head_dim;
        bf16 *keys = (bf16 *)tokens->contexts[b] + (2 * layer * kv_heads + h) * head_size;
        bf16 *values = keys + kv_heads * head_size;
        memcpy(keys + position * head_dim, tokens->k + b * tokens->k_stride + h * head_dim, head_dim * sizeof(bf16));
        memcpy(values + position * head_dim, tokens->v + b * tokens->v_stride + h * head_dim, head_dim * sizeof(bf16));
        const int64_t first = window && position + 1 > window ? position + 1 - window : 0;
        const bf16 *queries = tokens->q + b * tokens->q_stride + h * groups * head_dim;
        bf16 *to = tokens->out + task * groups * head_dim;
        if (head_dim == 64)
            attend(queries, keys, values, to, groups, first, position + 1, scaling, 4);
        else if (head_dim == 128)
            attend(queries, keys, values, to, groups, first, position + 1, scaling, 8);
        else
            attend(queries, keys, values, to, groups, first, position + 1, scaling, head_dim / LANES);
    }
}

void token_attention(const Tokens *tokens, int64_t layer, int64_t window, float scaling, int threads)
{
#pragma omp parallel num_threads(threads) if (threads > 1)
    token_attention_share(tokens, layer, window, scaling);
}
