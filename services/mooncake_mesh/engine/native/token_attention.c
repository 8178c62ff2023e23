/* Attention of one token of each of several sequences.
 *
 * Queries of one kv head attend over a tile of positions at a time: their scores, weights relative to the greatest score so
 * far, the values weighed by them. With AVX512-BF16 scores and mixtures are products of pairs; without it bfloat16 is
 * widened first. `vectors`, of a head, is a constant wherever a function with it is inlined.
 */
#include "team.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

enum {
    POSITIONS = 64, /* of a tile: it fits the first cache */
    PARTS = POSITIONS / LANES,
    MAX_GROUPS = 16,
    AHEAD = POSITIONS, /* how far before its use a row is fetched from memory */
};

typedef struct {
    const bf16 *query;
    float most;                        /* the greatest score so far, and what is relative to it: */
    floats total;                      /* the sums of exponentials, in sixteen parts */
    floats mixed[MAX_VECTORS];         /* the values, weighed by them */
    floats scores[PARTS];              /* of the tile, then its weights */
} Attended;

INLINE floats pairs(floats a, floats b) /* sums of neighbours: eight of a, then eight of b */
{
    const ints even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

/* Have so many vectors of bfloat16 come from memory while other things are done. There need not be any. */
INLINE void fetch(const bf16 *from, const int vectors)
{
    for (int i = 0; i < vectors; i += 2)
        __builtin_prefetch(from + i * LANES);
}

/* The sums of sixteen vectors, in order. */
#define SUMS(x)                                                                                              \
    pairs(pairs(pairs(pairs(x(0), x(1)), pairs(x(2), x(3))), pairs(pairs(x(4), x(5)), pairs(x(6), x(7)))),   \
          pairs(pairs(pairs(x(8), x(9)), pairs(x(10), x(11))), pairs(pairs(x(12), x(13)), pairs(x(14), x(15)))))

#ifdef __AVX512BF16__

typedef struct {
    uint32_t weights[MAX_GROUPS][POSITIONS / 2]; /* pairs of bfloat16 */
} Room;

INLINE floats dot(const bf16 *query, const bf16 *key, const int vectors)
{
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < vectors / 2; i++)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(query + 2 * i * LANES),
                               (__m512bh)_mm512_loadu_si512(key + 2 * i * LANES));
    return (floats)sum;
}

/* Scores of keys 0 to `last`, 15 at most; behind them, anything. */
INLINE floats sixteen_scores(const bf16 *query, const bf16 *keys, int last, const int vectors)
{
#define KEY(i) dot(query, keys + (i < last ? i : last) * vectors * LANES, vectors)
    return SUMS(KEY);
#undef KEY
}

INLINE void score(Attended *attended, int groups, const bf16 *k, int n, float scaling, Room *room, const int vectors)
{
    (void)room;
    for (int i = 0; i * LANES < n; i++) {
        const bf16 *keys = k + i * LANES * vectors * LANES;
        const int last = n - 1 - i * LANES;
        fetch(keys + AHEAD * vectors * LANES, LANES * vectors);
        for (int g = 0; g < groups; g++)
            attended[g].scores[i] = scaling * (last < LANES - 1 ? sixteen_scores(attended[g].query, keys, last, vectors)
                                                               : sixteen_scores(attended[g].query, keys, 15, vectors));
    }
}

#define EACH_MIXTURE(X) X(0, 0) X(0, 1) X(0, 2) X(0, 3) X(1, 0) X(1, 1) X(1, 2) X(1, 3) X(2, 0) X(2, 1) X(2, 2) X(2, 3) \
    X(3, 0) X(3, 1) X(3, 2) X(3, 3)

/* Adds 64 elements of values, from `v` on in each row, to vectors `at` to `at` + 3 of up to four mixtures, in the order in
 * which pairs are interleaved: see in_order. Every sum has a name: GCC writes those of an array to memory in every round. */
INLINE void mix_groups(Attended *attended, const uint32_t (*weights)[POSITIONS / 2], const bf16 *v, int n, int at,
                       const int groups, const int vectors)
{
    static const bf16 nothing[4 * LANES];
#define BEGIN(g, i) __m512 sum##g##i = g < groups ? (__m512)attended[g].mixed[at + i] : _mm512_setzero_ps();
#define ADD(g, i)     \
    if (g < groups)   \
        sum##g##i = _mm512_dpbf16_ps(sum##g##i, (__m512bh)_mm512_set1_epi32(weights[g][p]), (__m512bh)values##i);
#define END(g, i)     \
    if (g < groups)   \
        attended[g].mixed[at + i] = (floats)sum##g##i;
    EACH_MIXTURE(BEGIN)
    for (int p = 0; 2 * p < n; p++) {
        const bf16 *first = v + 2 * p * vectors * LANES, *second = 2 * p + 1 < n ? first + vectors * LANES : nothing;
        fetch(first + AHEAD * vectors * LANES, 4);
        fetch(first + (AHEAD + 1) * vectors * LANES, 4);
        const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(first + 2 * LANES);
        const __m512i c = _mm512_loadu_si512(second), d = _mm512_loadu_si512(second + 2 * LANES);
        const __m512i values0 = _mm512_unpacklo_epi16(a, c), values1 = _mm512_unpackhi_epi16(a, c);
        const __m512i values2 = _mm512_unpacklo_epi16(b, d), values3 = _mm512_unpackhi_epi16(b, d);
        EACH_MIXTURE(ADD)
    }
    EACH_MIXTURE(END)
#undef BEGIN
#undef ADD
#undef END
}

INLINE void mix(Attended *attended, int groups, const bf16 *v, int n, Room *room, const int vectors)
{
    for (int g = 0; g < groups; g++)
        for (int i = 0; i < PARTS; i++) {
            const __m256bh rounded = _mm512_cvtneps_pbh((__m512)attended[g].scores[i]);
            memcpy(room->weights[g] + i * LANES / 2, &rounded, sizeof rounded);
        }
    for (int at = 0; at < vectors; at += 4)
        for (int g = 0; g < groups; g += 4) {
            const int left = groups - g;
            if (left >= 4)
                mix_groups(attended + g, room->weights + g, v + at * LANES, n, at, 4, vectors);
            else if (left == 3)
                mix_groups(attended + g, room->weights + g, v + at * LANES, n, at, 3, vectors);
            else if (left == 2)
                mix_groups(attended + g, room->weights + g, v + at * LANES, n, at, 2, vectors);
            else
                mix_groups(attended + g, room->weights + g, v + at * LANES, n, at, 1, vectors);
        }
}

/* Of 32 elements, those that unpacklo and unpackhi have taken, in order. */
INLINE void in_order(floats *low, floats *high)
{
    const ints first = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const floats a = __builtin_shuffle(*low, *high, first), b = __builtin_shuffle(*low, *high, first + 8);
    *low = a, *high = b;
}

INLINE void finish(Attended *attended, const int vectors)
{
    for (int i = 0; i < vectors; i += 2)
        in_order(attended->mixed + i, attended->mixed + i + 1);
}

#else

typedef struct {
    floats wide[POSITIONS * MAX_VECTORS];
} Room;

INLINE void widen(floats *to, const bf16 *from, int n, int padded, const int vectors)
{
    for (int i = 0; i < n * vectors; i++) {
        to[i] = load(from + i * LANES);
        if (i % 2 == 0)
            fetch(from + (AHEAD * vectors + i) * LANES, 2);
    }
    for (int i = n * vectors; i < padded * vectors; i++)
        to[i] = all(0);
}

INLINE floats dot(const floats *query, const floats *key, const int vectors)
{
    floats sum = query[0] * key[0];
    for (int i = 1; i < vectors; i++)
        sum += query[i] * key[i];
    return sum;
}

INLINE void score(Attended *attended, int groups, const bf16 *k, int n, float scaling, Room *room, const int vectors)
{
    const int parts = (n + LANES - 1) / LANES;
    widen(room->wide, k, n, parts * LANES, vectors);
    for (int g = 0; g < groups; g++) {
        floats query[MAX_VECTORS];
        widen(query, attended[g].query, 1, 1, vectors);
        for (int i = 0; i < parts; i++) {
            const floats *keys = room->wide + i * LANES * vectors;
#define KEY(key) dot(query, keys + key * vectors, vectors)
            attended[g].scores[i] = scaling * SUMS(KEY);
#undef KEY
        }
    }
}

INLINE void mix(Attended *attended, int groups, const bf16 *v, int n, Room *room, const int vectors)
{
    widen(room->wide, v, n, n, vectors);
    for (int g = 0; g < groups; g++) {
        const float *weights = (const float *)attended[g].scores;
        for (int i = 0; i < vectors; i++) {
            floats even = attended[g].mixed[i], odd = all(0); /* two sums, or each product would wait for the last */
            for (int p = 0; p + 1 < n; p += 2) {
                even += weights[p] * room->wide[p * vectors + i];
                odd += weights[p + 1] * room->wide[(p + 1) * vectors + i];
            }
            if (n % 2)
                even += weights[n - 1] * room->wide[(n - 1) * vectors + i];
            attended[g].mixed[i] = even + odd;
        }
    }
}

INLINE void finish(Attended *attended, const int vectors)
{
    (void)attended, (void)vectors;
}

#endif

/* The scores of a tile of n positions become weights, relative to the greatest so far. */
INLINE void weigh(Attended *attended, int n, const int vectors)
{
    const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    floats top = all(attended->most);
    for (int i = 0; i < PARTS; i++) {
        const floats s = choose(lane < (n - i * LANES) - (ints){}, attended->scores[i], all(-INFINITY));
        attended->scores[i] = s;
        top = choose(s > top, s, top);
    }
    const float most = greatest(top);
    const float shrink = expf(attended->most - most);
    attended->most = most;
    attended->total *= shrink;
    for (int i = 0; i < vectors; i++)
        attended->mixed[i] *= shrink;
    for (int i = 0; i < PARTS; i++) {
        attended->scores[i] = exp_of(attended->scores[i] - most);
        attended->total += attended->scores[i];
    }
}

/* Queries of one kv head over positions [first, end) of its k and v (position, head_dim). */
INLINE void attend(const bf16 *queries, const bf16 *k, const bf16 *v, bf16 *out, int groups, int64_t first, int64_t end,
                   float scaling, const int vectors)
{
    const int head_dim = vectors * LANES;
    Room room;
    Attended attended[MAX_GROUPS];
    for (int g = 0; g < groups; g++) {
        attended[g].query = queries + g * head_dim;
        attended[g].most = -INFINITY;
        attended[g].total = all(0);
        for (int i = 0; i < vectors; i++)
            attended[g].mixed[i] = all(0);
    }
    fetch(v + first * head_dim, AHEAD * vectors);
    for (int64_t at = first; at < end; at += POSITIONS) {
        const int n = end - at < POSITIONS ? end - at : POSITIONS;
        score(attended, groups, k + at * head_dim, n, scaling, &room, vectors);
        for (int g = 0; g < groups; g++)
            weigh(attended + g, n, vectors);
        mix(attended, groups, v + at * head_dim, n, &room, vectors);
    }
    for (int g = 0; g < groups; g++) {
        const float share = 1.0f / sum(attended[g].total);
        finish(attended + g, vectors);
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
