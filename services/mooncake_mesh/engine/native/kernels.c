/* Attention, normalization and rotation of bfloat16 on the CPU, for the engine (see native/__init__.py).
 *
 * Compiled at load for the machine it runs on. Vectors are GCC's, 16 floats wide, which the compiler cuts to what the
 * processor has; only the products of prompts are written for AVX512-BF16, and absent without it. Sums are
 * float32 throughout; results are rounded once. OpenMP is torch's own: nothing is linked here, so both share one team.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef uint16_t bf16;
typedef float floats __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

enum { LANES = 16, MAX_HEAD_DIM = 256, MAX_VECTORS = MAX_HEAD_DIM / LANES };

#define INLINE static inline __attribute__((always_inline))

INLINE floats load(const bf16 *from)
{
    halves h;
    memcpy(&h, from, sizeof h);
    return (floats)(__builtin_convertvector(h, words) << 16);
}

/* Rounds to the nearest, ties to even. */
INLINE void store(bf16 *to, floats x)
{
    words u = (words)x;
    u += 0x7fffu + ((u >> 16) & 1u);
    halves h = __builtin_convertvector(u >> 16, halves);
    memcpy(to, &h, sizeof h);
}

INLINE floats all(float x) { return x - (floats){}; }

INLINE floats choose(ints where, floats a, floats b) { return (floats)(((ints)a & where) | ((ints)b & ~where)); }

/* x, its lanes turned by n. */
INLINE floats turned(floats x, int n)
{
    const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __builtin_shuffle(x, lane + n);
}

INLINE float sum(floats x)
{
    for (int n = LANES / 2; n > 0; n /= 2)
        x += turned(x, n);
    return x[0];
}

INLINE float greatest(floats x)
{
    for (int n = LANES / 2; n > 0; n /= 2) {
        const floats other = turned(x, n);
        x = choose(x > other, x, other);
    }
    return x[0];
}

/* e to the power of x <= 0, to within rounding of a bfloat16; 0 for what is below -87, -inf too. */
INLINE floats exp_of(floats x)
{
    const ints small = x < all(-87.0f);
    x = choose(small, all(-87.0f), x);
    const floats t = x * 1.44269504f;
    const ints n = __builtin_convertvector(t - 0.5f, ints); /* towards 0, so the nearest of what is negative */
    const floats r = (t - __builtin_convertvector(n, floats)) * 0.69314718f;
    floats p = r * (1.0f / 120) + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const floats power = (floats)((n + 127) << 23);
    p *= power;
    return choose(small, all(0), p);
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

/* Each row of `size`, a multiple of 16, divided by its root mean square and times `weight`. */
void rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t size, float eps, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 15)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *from = x + row * size;
        bf16 *to = out + row * size;
        floats squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            const floats a = load(from + i);
            squares += a * a;
        }
        const float factor = 1.0f / sqrtf(sum(squares) / size + eps);
        for (int64_t i = 0; i < size; i += LANES)
            store(to + i, load(from + i) * factor * load(weight + i));
    }
}

/* Turn the first `heads` heads of each row in place. cos and sin: (rows, head_dim). */
void rotate(bf16 *x, const bf16 *cos, const bf16 *sin, int64_t rows, int64_t row_stride, int64_t heads, int64_t head_dim,
            int threads)
{
    const int64_t half = head_dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 15)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t i = 0; i < half; i += LANES) {
                bf16 *low = x + row * row_stride + head * head_dim + i, *high = low + half;
                const bf16 *c = cos + row * head_dim + i, *s = sin + row * head_dim + i;
                const floats a = load(low), b = load(high);
                store(low, a * load(c) - b * load(s));
                store(high, b * load(c + half) + a * load(s + half));
            }
}

/* --- one token of each of several sequences ----------------------------------------------------------------------- */

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
void decode_attention(const bf16 *q, const bf16 *k, const bf16 *v, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                      bf16 *out, const int64_t *contexts, int64_t layer, const int64_t *capacities,
                      const int64_t *positions, int64_t batch, int64_t kv_heads, int64_t groups, int64_t head_dim,
                      int64_t window, float scaling, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
    for (int64_t task = 0; task < batch * kv_heads; task++) {
        const int64_t b = task / kv_heads, h = task % kv_heads, position = positions[b];
        const int64_t head_size = capacities[b] * head_dim;
        bf16 *keys = (bf16 *)contexts[b] + (2 * layer * kv_heads + h) * head_size;
        bf16 *values = keys + kv_heads * head_size;
        memcpy(keys + position * head_dim, k + b * k_stride + h * head_dim, head_dim * sizeof(bf16));
        memcpy(values + position * head_dim, v + b * v_stride + h * head_dim, head_dim * sizeof(bf16));
        const int64_t first = window && position + 1 > window ? position + 1 - window : 0;
        const bf16 *queries = q + b * q_stride + h * groups * head_dim;
        bf16 *to = out + task * groups * head_dim;
        if (head_dim == 64)
            attend(queries, keys, values, to, groups, first, position + 1, scaling, 4);
        else if (head_dim == 128)
            attend(queries, keys, values, to, groups, first, position + 1, scaling, 8);
        else
            attend(queries, keys, values, to, groups, first, position + 1, scaling, head_dim / LANES);
    }
}

/* --- pages -------------------------------------------------------------------------------------------------------- */

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

/* --- a chunk of a prompt ------------------------------------------------------------------------------------------ */

/* Whether chunk_attention is more than a name here. */
int has_chunk_attention(void)
{
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

#ifdef __AVX512BF16__

enum {
    TILE = 64,   /* keys, or elements of a head, that one product works out at a time */
    TILES = 4,   /* of keys, whose scores are worked out before they weigh values */
    ROWS = 6,    /* of queries in one product: with four vectors each they fill the registers */
    BLOCK = 48,  /* queries of one task, a multiple of ROWS */
};

/* c (ROWS, 64) = or += a times b: a has rows of pairs of bfloat16, b (pairs, columns) such pairs, `stride` apart. */
INLINE void multiply(float *c, int64_t c_stride, const uint32_t *const *a, const uint32_t *b, int64_t stride, int64_t pairs,
                     const int adds)
{
    __m512 sums[ROWS][4];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 4; i++)
            sums[r][i] = adds ? _mm512_loadu_ps(c + r * c_stride + i * LANES) : _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++) {
        __m512bh columns[4];
        for (int i = 0; i < 4; i++)
            columns[i] = (__m512bh)_mm512_loadu_si512(b + p * stride + i * LANES);
        for (int r = 0; r < ROWS; r++) {
            const __m512bh row = (__m512bh)_mm512_set1_epi32(a[r][p]);
            for (int i = 0; i < 4; i++)
                sums[r][i] = _mm512_dpbf16_ps(sums[r][i], row, columns[i]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 4; i++)
            _mm512_storeu_ps(c + r * c_stride + i * LANES, sums[r][i]);
}

/* 64 keys (n of them there, the rest 0) as (head_dim / 2, 64) pairs: neighbours in the head. */
static void pack_keys(uint32_t *to, const bf16 *from, int n, int64_t head_dim)
{
    for (int key = 0; key < TILE; key++) {
        const bf16 *row = from + key * head_dim;
        for (int64_t p = 0; p < head_dim / 2; p++) {
            uint32_t pair = 0;
            if (key < n)
                memcpy(&pair, row + 2 * p, sizeof pair);
            to[p * TILE + key] = pair;
        }
    }
}

/* 64 values as (32, head_dim) pairs: neighbours in the sequence. */
static void pack_values(uint32_t *to, const bf16 *from, int n, int64_t head_dim)
{
    for (int p = 0; p < TILE / 2; p++)
        for (int64_t i = 0; i < head_dim; i++) {
            const uint32_t low = 2 * p < n ? from[2 * p * head_dim + i] : 0;
            const uint32_t high = 2 * p + 1 < n ? from[(2 * p + 1) * head_dim + i] : 0;
            to[p * head_dim + i] = low | high << 16;
        }
}

/* Rows of one block on their way: their queries, what they have seen, and room to work. */
typedef struct {
    const uint32_t *queries[BLOCK];
    const uint32_t *weight_rows[BLOCK];
    int64_t positions[BLOCK];
    float most[BLOCK], total[BLOCK], shrink[BLOCK];
    float scores[BLOCK][TILES * TILE] __attribute__((aligned(64)));
    bf16 weights[BLOCK][TILES * TILE] __attribute__((aligned(64)));
    float mixed[BLOCK * MAX_HEAD_DIM] __attribute__((aligned(64))); /* (BLOCK, head_dim) */
} Block;

/* 2 to the power of x <= 0, to within rounding of a bfloat16; 0 for what is below -127. */
INLINE __m512 power_of_two(__m512 x)
{
    x = _mm512_max_ps(x, _mm512_set1_ps(-150));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = x - whole;
    const __m512 p = 1.0f + r * (0.69314718f + r * (0.24022651f + r * (0.05550411f + r * 0.00961813f)));
    return _mm512_scalef_ps(p, whole);
}

/* The scores of one row for n keys from `at` on become weights, relative to the greatest so far. `scaling` is that of
 * scores, positive, times the binary logarithm of e: weights are powers of two. */
INLINE void weigh(Block *block, int row, int64_t at, int n, int64_t window, float scaling)
{
    const int64_t position = block->positions[row];
    const int end = position - at + 1 < n ? position - at + 1 : n;                           /* keys below it are seen */
    const int first = window && position + 1 - window > at ? position + 1 - window - at : 0; /* and from here on */
    float *scores = block->scores[row];
    for (int key = 0; key < first; key++)
        scores[key] = -INFINITY;
    for (int key = end < 0 ? 0 : end; key < n; key++)
        scores[key] = -INFINITY;
    __m512 top = _mm512_set1_ps(block->most[row]);
    for (int i = 0; i < n; i += LANES)
        top = _mm512_max_ps(top, _mm512_load_ps(scores + i));
    const float most = _mm512_reduce_max_ps(top), base = most == -INFINITY ? 0 : most * scaling;
    block->shrink[row] = most == block->most[row] ? 1 : exp2f(block->most[row] * scaling - base);
    block->most[row] = most;
    __m512 total = _mm512_setzero_ps();
    for (int i = 0; i < n; i += LANES) {
        const __m512 w = power_of_two(_mm512_load_ps(scores + i) * scaling - base);
        total += w;
        const __m256bh rounded = _mm512_cvtneps_pbh(w);
        memcpy(block->weights[row] + i, &rounded, sizeof rounded);
    }
    block->total[row] = block->total[row] * block->shrink[row] + _mm512_reduce_add_ps(total);
}

static void attend_block(Block *block, int rows, const uint32_t *keys, const uint32_t *values, int64_t window,
                         int64_t head_dim, float scaling)
{
    const int64_t tile_size = TILE * head_dim / 2;
    const int64_t last = block->positions[rows - 1] / TILE, first_seen = block->positions[0] + 1 - window;
    for (int64_t tile = window && first_seen > 0 ? first_seen / TILE : 0; tile <= last; tile += TILES) {
        const int n = last - tile + 1 < TILES ? last - tile + 1 : TILES;
        for (int t = 0; t < n; t++)
            for (int r = 0; r < rows; r += ROWS)
                multiply(block->scores[r] + t * TILE, TILES * TILE, block->queries + r, keys + (tile + t) * tile_size, TILE,
                         head_dim / 2, 0);
        for (int r = 0; r < rows; r++) {
            weigh(block, r, tile * TILE, n * TILE, window, scaling);
            if (block->shrink[r] != 1.0f)
                for (int64_t i = 0; i < head_dim; i++)
                    block->mixed[r * head_dim + i] *= block->shrink[r];
        }
        for (int64_t column = 0; column < head_dim; column += TILE)
            for (int r = 0; r < rows; r += ROWS)
                multiply(block->mixed + r * head_dim + column, head_dim, block->weight_rows + r, values + tile * tile_size + column,
                         head_dim, n * TILE / 2, 1);
    }
}

/* Attention of `tokens` queries behind `start` positions, each over all up to its own, or the last `window` of these.
 *
 * q: (tokens, kv_heads * groups, head_dim), tokens q_stride elements apart; k and v: (kv_heads, .., head_dim), heads
 * k_stride and v_stride apart; head_dim a multiple of 64. out: (tokens, kv_heads * groups, head_dim).
 * room: for K and V of all positions, rounded up to 64, in another order.
 */
void chunk_attention(const bf16 *q, int64_t q_stride, const bf16 *k, const bf16 *v, int64_t k_stride, int64_t v_stride,
                     bf16 *out, uint32_t *room, int64_t tokens, int64_t start, int64_t kv_heads, int64_t groups, int64_t head_dim,
                     int64_t window, float scaling, int threads)
{
    const int64_t positions = start + tokens, tiles = (positions + TILE - 1) / TILE;
    const int64_t tile_size = TILE * head_dim / 2, head_size = tiles * tile_size;
    uint32_t *const values_room = room + kv_heads * head_size;
    const int64_t block_tokens = BLOCK / groups, blocks = (tokens + block_tokens - 1) / block_tokens;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int64_t task = 0; task < kv_heads * tiles; task++) {
            const int64_t head = task / tiles, at = task % tiles * TILE;
            const int n = positions - at < TILE ? positions - at : TILE;
            pack_keys(room + task * tile_size, k + head * k_stride + at * head_dim, n, head_dim);
            pack_values(values_room + task * tile_size, v + head * v_stride + at * head_dim, n, head_dim);
        }
        Block block;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < kv_heads * blocks; task++) {
            /* The longest rows first: no thread is left with one at the end. */
            const int64_t head = task % kv_heads, token = (blocks - 1 - task / kv_heads) * block_tokens;
            const int64_t n = (tokens - token < block_tokens ? tokens - token : block_tokens) * groups;
            const int rows = (n + ROWS - 1) / ROWS * ROWS;
            for (int64_t r = 0; r < rows; r++) {
                const int64_t real = r < n ? r : n - 1, t = token + real / groups, g = head * groups + real % groups;
                block.queries[r] = (const uint32_t *)(q + t * q_stride + g * head_dim);
                block.weight_rows[r] = (const uint32_t *)block.weights[r];
                block.positions[r] = start + t;
                block.most[r] = -INFINITY;
                block.total[r] = 0;
                memset(block.mixed + r * head_dim, 0, head_dim * sizeof(float));
            }
            attend_block(&block, rows, room + head * head_size, values_room + head * head_size, window, head_dim,
                         scaling * 1.44269504f);
            for (int64_t r = 0; r < n; r++) {
                bf16 *to = out + ((token + r / groups) * kv_heads * groups + head * groups + r % groups) * head_dim;
                const float share = 1.0f / block.total[r];
                for (int64_t i = 0; i < head_dim; i += LANES)
                    store(to + i, *(floats *)(block.mixed + r * head_dim + i) * share);
            }
        }
    }
}
#endif
