/* Attention of a chunk of a prompt, by products of AVX512-BF16; absent without it.
 *
 * A vector holds the same of 16 queries: their scores for one key, or one element of what they get. So keys are read
 * where they lie, and greatest and sum of a query's scores are those of a lane.
 */
#include "team.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

/* Whether there are products here: what is absent without AVX512-BF16. */
int multiplies_bfloat16(void)
{
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

#ifdef __AVX512BF16__

enum {
    ROWS = 8,                /* keys, or elements of a head, of one product */
    VECTORS = 3,             /* of queries: with so many each, the sums of all rows fill the registers */
    BLOCK = VECTORS * LANES, /* queries of one task */
    TILE = 256,              /* keys whose scores are worked out before they weigh values */
    PACKED = 64,             /* values of one task to pack; all are multiples of ROWS */
    AHEAD = 4096,            /* bytes: how far before their use keys are fetched from memory */
    VALUES_AHEAD = 8192,     /* the same for values to pack */
};

static const float LEAST = -1e30f; /* far below any score, and far from overflow */

#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define EACH_CELL(X) X(0, 0) X(0, 1) X(0, 2) X(1, 0) X(1, 1) X(1, 2) X(2, 0) X(2, 1) X(2, 2) X(3, 0) X(3, 1) X(3, 2) \
    X(4, 0) X(4, 1) X(4, 2) X(5, 0) X(5, 1) X(5, 2) X(6, 0) X(6, 1) X(6, 2) X(7, 0) X(7, 1) X(7, 2)

/* c (ROWS, BLOCK) = or += a times b: a has pairs of bfloat16, `row_step` from row to row and `step` along one, b
 * (pairs, BLOCK) such pairs. Of `vectors` vectors of columns; it and `adds` are constants wherever this is inlined.
 * From `next` on as much as ROWS of a are is fetched from memory meanwhile; NULL for nothing.
 *
 * Every sum has a name: GCC writes those of an array to memory in every round. */
INLINE void multiply(float *c, const uint32_t *a, int64_t row_step, int64_t step, const uint32_t *b, int64_t pairs,
                     const char *next, const int vectors, const int adds)
{
#define BEGIN(r, i) \
    __m512 sum##r##i = adds && i < vectors ? _mm512_load_ps(c + r * BLOCK + i * LANES) : _mm512_setzero_ps();
#define ADD(r, i)    \
    if (i < vectors) \
        sum##r##i = _mm512_dpbf16_ps(sum##r##i, row##r, columns##i);
#define END(r, i)    \
    if (i < vectors) \
        _mm512_store_ps(c + r * BLOCK + i * LANES, sum##r##i);
    EACH_CELL(BEGIN)
    for (int64_t p = 0; p < pairs; p++, a += step, b += BLOCK) {
        if (next) {
            __builtin_prefetch(next);
            next += ROWS * sizeof(uint32_t);
        }
        const __m512bh columns0 = (__m512bh)_mm512_load_si512(b);
        const __m512bh columns1 = vectors > 1 ? (__m512bh)_mm512_load_si512(b + LANES) : columns0;
        const __m512bh columns2 = vectors > 2 ? (__m512bh)_mm512_load_si512(b + 2 * LANES) : columns0;
#define ROW(r)                                                            \
    const __m512bh row##r = (__m512bh)_mm512_set1_epi32(a[r * row_step]); \
    ADD(r, 0) ADD(r, 1) ADD(r, 2)
        EACH_ROW(ROW)
    }
    EACH_CELL(END)
#undef ROW
#undef BEGIN
#undef ADD
#undef END
}

/* For `vectors` vectors of queries: `score` gives their products with n keys, `mix` adds those of n weights and values.
 *
 * Functions of their own: inlined, GCC reads each column anew for every row, to keep other numbers in registers. */
#define PRODUCTS(vectors)                                                                                              \
    static __attribute__((noinline)) void score##vectors(float *scores, const bf16 *keys, const uint32_t *queries,     \
                                                         int64_t head_dim, int64_t n)                                  \
    {                                                                                                                  \
        for (int64_t key = 0; key < n; key += ROWS, keys += ROWS * head_dim)                                           \
            multiply(scores + key * BLOCK, (const uint32_t *)keys, head_dim / 2, 1, queries, head_dim / 2,             \
                     (const char *)keys + AHEAD, vectors, 0);                                                          \
    }                                                                                                                  \
    static __attribute__((noinline)) void mix##vectors(float *mixed, const uint32_t *values, const uint32_t *weights,  \
                                                       int64_t head_dim, int64_t n)                                    \
    {                                                                                                                  \
        for (int64_t i = 0; i < head_dim; i += ROWS)                                                                   \
            multiply(mixed + i * BLOCK, values + i, 1, head_dim, weights, n / 2, NULL, vectors, 1);                    \
    }
PRODUCTS(1)
PRODUCTS(2)
PRODUCTS(3)

/* What is in the two halves of x in turn. */
INLINE __m512i interleaved(__m512i x)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, x);
}

/* 16 pairs of bfloat16: `low` rounded and `high` rounded. */
INLINE __m512i paired(__m512 low, __m512 high) { return interleaved((__m512i)_mm512_cvtne2ps_pbh(high, low)); }

/* n values, and 0 for what is missing to whole ROWS, as (.., head_dim) pairs: neighbours in the sequence. */
static void pack_values(uint32_t *to, const bf16 *from, int n, int64_t head_dim)
{
    const __m256i none = _mm256_setzero_si256();
    for (int at = 0; at < n || at % ROWS; at += 2, from += 2 * head_dim)
        for (int64_t i = 0; i < head_dim; i += LANES, to += LANES) {
            const bf16 *low = from + i, *high = low + head_dim;
            __builtin_prefetch((const char *)low + VALUES_AHEAD);
            __builtin_prefetch((const char *)high + VALUES_AHEAD);
            const __m256i one = at < n ? _mm256_loadu_si256((const __m256i *)low) : none;
            const __m256i other = at + 1 < n ? _mm256_loadu_si256((const __m256i *)high) : none;
            _mm512_storeu_si512(to, interleaved(_mm512_inserti64x4(_mm512_castsi256_si512(one), other, 1)));
        }
}

/* Queries of one task on their way: what they have seen, and room to work. Lanes beyond the last repeat it. */
typedef struct {
    int64_t rows;
    uint32_t queries[MAX_HEAD_DIM / 2 * BLOCK] __attribute__((aligned(64))); /* (head_dim / 2, BLOCK) pairs */
    float scores[TILE * BLOCK] __attribute__((aligned(64)));                 /* (TILE, BLOCK) */
    uint32_t weights[TILE / 2 * BLOCK] __attribute__((aligned(64)));         /* (TILE / 2, BLOCK) pairs of keys */
    float mixed[MAX_HEAD_DIM * BLOCK] __attribute__((aligned(64)));          /* (head_dim, BLOCK) */
    float most[BLOCK] __attribute__((aligned(64))), total[BLOCK] __attribute__((aligned(64)));
    int32_t positions[BLOCK] __attribute__((aligned(64)));
    int32_t froms[BLOCK] __attribute__((aligned(64))); /* where they are in q, in pairs */
    int32_t tos[BLOCK] __attribute__((aligned(64)));   /* and where in out */
    bf16 last_keys[ROWS * MAX_HEAD_DIM]; /* those after the last whole ROWS: behind them the context may end */
} Block;

/* 2 to the power of x <= 0, to within rounding of a bfloat16; 0 for what is below -127. */
INLINE __m512 power_of_two(__m512 x)
{
    x = _mm512_max_ps(x, _mm512_set1_ps(-150));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = x - whole;
    const __m512 p = 1.0f + r * (0.69314718f + r * (0.24022651f + r * (0.05550411f + r * 0.00961813f)));
    return _mm512_scalef_ps(p, whole);
}

/* Scores of n keys from `at` on that vector v's queries do not see become -inf. */
INLINE void hide(Block *block, int v, int64_t at, int n, int64_t window)
{
    const __m512i positions = _mm512_load_si512(block->positions + v * LANES);
    const __m512i first = _mm512_sub_epi32(positions, _mm512_set1_epi32(window ? window - 1 : INT32_MAX));
    for (int key = 0; key < n; key++) {
        float *scores = block->scores + key * BLOCK + v * LANES;
        const __m512i position = _mm512_set1_epi32(at + key);
        const __mmask16 seen = _mm512_cmple_epi32_mask(position, positions) & _mm512_cmpge_epi32_mask(position, first);
        _mm512_store_ps(scores, _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), _mm512_load_ps(scores)));
    }
}

/* The scores of vector v for n keys become weights, relative to the greatest so far; what was mixed by others shrinks.
 * `scaling` is that of scores, positive, times the binary logarithm of e: weights are powers of two. */
INLINE void weigh(Block *block, int v, int n, int64_t head_dim, float scaling)
{
    const float *scores = block->scores + v * LANES;
    const __m512 before = _mm512_load_ps(block->most + v * LANES);
    __m512 most = before, other = before;
    for (int key = 0; key < n; key += 2) {
        most = _mm512_max_ps(most, _mm512_load_ps(scores + key * BLOCK));
        other = _mm512_max_ps(other, _mm512_load_ps(scores + (key + 1) * BLOCK));
    }
    most = _mm512_max_ps(most, other);
    const __m512 base = most * scaling;
    __m512 total = _mm512_load_ps(block->total + v * LANES);
    if (_mm512_cmpneq_ps_mask(most, before)) {
        const __m512 shrink = power_of_two(before * scaling - base);
        total *= shrink;
        for (int64_t i = 0; i < head_dim; i++)
            *(__m512 *)(block->mixed + i * BLOCK + v * LANES) *= shrink;
        _mm512_store_ps(block->most + v * LANES, most);
    }
    __m512 rest = _mm512_setzero_ps();
    for (int key = 0; key < n; key += 2) {
        const __m512 low = power_of_two(_mm512_load_ps(scores + key * BLOCK) * scaling - base);
        const __m512 high = power_of_two(_mm512_load_ps(scores + (key + 1) * BLOCK) * scaling - base);
        total += low;
        rest += high;
        _mm512_store_si512(block->weights + key / 2 * BLOCK + v * LANES, paired(low, high));
    }
    _mm512_store_ps(block->total + v * LANES, total + rest);
}

/* One head's keys and packed values, up to position `end`, where the block's last query is. */
static void attend(Block *block, const Chunk *chunk, const bf16 *keys, const uint32_t *values, int64_t end)
{
    static void (*const scores[])(float *, const bf16 *, const uint32_t *, int64_t, int64_t) = {score1, score2, score3};
    static void (*const mixes[])(float *, const uint32_t *, const uint32_t *, int64_t, int64_t) = {mix1, mix2, mix3};
    const int64_t head_dim = chunk->head_dim, window = chunk->window, whole = end - end % ROWS;
    const int64_t all_see = block->positions[0] + 1; /* of the keys, but for a window */
    const int vectors = (block->rows + LANES - 1) / LANES;
    memset(block->last_keys, 0, ROWS * head_dim * sizeof(bf16));
    memcpy(block->last_keys, keys + whole * head_dim, (end - whole) * head_dim * sizeof(bf16));
    for (int64_t at = window && all_see > window ? (all_see - window) / ROWS * ROWS : 0; at < end; at += TILE) {
        const int there = whole - at < TILE ? whole - at : TILE, n = there < TILE && whole < end ? there + ROWS : there;
        scores[vectors - 1](block->scores, keys + at * head_dim, block->queries, head_dim, there);
        if (there < n)
            scores[vectors - 1](block->scores + there * BLOCK, block->last_keys, block->queries, head_dim, ROWS);
        for (int v = 0; v < vectors; v++) {
            if (window || at + n > all_see)
                hide(block, v, at, n, window);
            weigh(block, v, n, head_dim, chunk->scaling * 1.44269504f);
        }
        mixes[vectors - 1](block->mixed, values + at / 2 * head_dim, block->weights, head_dim, n);
    }
}

/* Queries `token` onwards of one head, `n` with their groups. */
static void begin(Block *block, const Chunk *chunk, int64_t head, int64_t token, int64_t n)
{
    const int64_t groups = chunk->groups, head_dim = chunk->head_dim, heads = chunk->kv_heads * groups;
    for (int64_t r = 0; r < BLOCK; r++) {
        const int64_t real = r < n ? r : n - 1, t = token + real / groups, g = head * groups + real % groups;
        block->froms[r] = (t * chunk->q_stride + g * head_dim) / 2;
        block->tos[r] = (t * heads + g) * head_dim / 2;
        block->positions[r] = chunk->start + t;
        block->most[r] = LEAST;
        block->total[r] = 0;
    }
    for (int64_t p = 0; p < head_dim / 2; p++)
        for (int v = 0; v < VECTORS; v++)
            _mm512_store_si512(block->queries + p * BLOCK + v * LANES,
                               _mm512_i32gather_epi32(_mm512_load_si512(block->froms + v * LANES),
                                                      (const uint32_t *)chunk->q + p, sizeof(uint32_t)));
    memset(block->mixed, 0, head_dim * BLOCK * sizeof(float));
    block->rows = n;
}

/* What the block's queries got goes to where they belong. */
static void finish(const Block *block, const Chunk *chunk)
{
    for (int64_t v = 0, left = block->rows; left > 0; v++, left -= LANES) {
        const __mmask16 there = left < LANES ? (1u << left) - 1 : 0xffffu;
        const __m512 share = 1.0f / _mm512_load_ps(block->total + v * LANES);
        for (int64_t i = 0; i < chunk->head_dim; i += 2) {
            const float *mixed = block->mixed + i * BLOCK + v * LANES;
            const __m512i both = paired(_mm512_load_ps(mixed) * share, _mm512_load_ps(mixed + BLOCK) * share);
            _mm512_mask_i32scatter_epi32((uint32_t *)chunk->out + i / 2, there,
                                         _mm512_load_si512(block->tos + v * LANES), both, sizeof(uint32_t));
        }
    }
}

void chunk_attention_share(const Chunk *chunk, uint32_t *room)
{
    const int64_t positions = chunk->start + chunk->tokens, parts = (positions + PACKED - 1) / PACKED;
    const int64_t head_dim = chunk->head_dim, kv_heads = chunk->kv_heads, groups = chunk->groups;
    const int64_t part_size = PACKED / 2 * head_dim;
    const int64_t block_tokens = BLOCK / groups, blocks = (chunk->tokens + block_tokens - 1) / block_tokens;
#pragma omp for
    for (int64_t task = 0; task < kv_heads * parts; task++) {
        const int64_t head = task / parts, at = task % parts * PACKED;
        pack_values(room + task * part_size, chunk->v + head * chunk->v_stride + at * head_dim,
                    positions - at < PACKED ? positions - at : PACKED, head_dim);
    }
    Block block;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < kv_heads * blocks; task++) {
        /* Head by head: a cache has room for the keys and values of one. Each one's longest first: no thread is left
         * with one at the end. */
        const int64_t head = task / blocks, token = (blocks - 1 - task % blocks) * block_tokens;
        const int64_t tokens = chunk->tokens - token < block_tokens ? chunk->tokens - token : block_tokens;
        begin(&block, chunk, head, token, tokens * groups);
        attend(&block, chunk, chunk->k + head * chunk->k_stride, room + head * parts * part_size,
               chunk->start + token + tokens);
        finish(&block, chunk);
    }
}

void chunk_attention(const Chunk *chunk, uint32_t *room, int threads)
{
#pragma omp parallel num_threads(threads) if (threads > 1)
    chunk_attention_share(chunk, room);
}
#endif
