/* Attention of a chunk of a prompt, by products of AVX512-BF16; absent without it. */
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
    TILE = 64,   /* keys, or elements of a head, that one product works out at a time */
    TILES = 4,   /* of keys, whose scores are worked out before they weigh values */
    ROWS = 6,    /* of queries in one product: with four vectors each they fill the registers */
    BLOCK = 48,  /* queries of one task, a multiple of ROWS */
};

#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define EACH_CELL(X) X(0, 0) X(0, 1) X(0, 2) X(0, 3) X(1, 0) X(1, 1) X(1, 2) X(1, 3) X(2, 0) X(2, 1) X(2, 2) X(2, 3) \
    X(3, 0) X(3, 1) X(3, 2) X(3, 3) X(4, 0) X(4, 1) X(4, 2) X(4, 3) X(5, 0) X(5, 1) X(5, 2) X(5, 3)

/* c (ROWS, 64) = or += a times b: a has rows of pairs of bfloat16, b (pairs, columns) such pairs, `stride` apart.
 *
 * Every sum has a name: GCC writes those of an array to memory in every round. */
INLINE void multiply(float *c, int64_t c_stride, const uint32_t *const *a, const uint32_t *b, int64_t stride, int64_t pairs,
                     const int adds)
{
#define ROW(r) const uint32_t *const a##r = a[r];
#define BEGIN(r, i) __m512 sum##r##i = adds ? _mm512_loadu_ps(c + r * c_stride + i * LANES) : _mm512_setzero_ps();
#define ADD(r, i) sum##r##i = _mm512_dpbf16_ps(sum##r##i, (__m512bh)_mm512_set1_epi32(a##r[p]), columns##i);
#define END(r, i) _mm512_storeu_ps(c + r * c_stride + i * LANES, sum##r##i);
    EACH_ROW(ROW)
    EACH_CELL(BEGIN)
    for (int64_t p = 0; p < pairs; p++) {
        const __m512bh columns0 = (__m512bh)_mm512_loadu_si512(b + p * stride);
        const __m512bh columns1 = (__m512bh)_mm512_loadu_si512(b + p * stride + LANES);
        const __m512bh columns2 = (__m512bh)_mm512_loadu_si512(b + p * stride + 2 * LANES);
        const __m512bh columns3 = (__m512bh)_mm512_loadu_si512(b + p * stride + 3 * LANES);
        EACH_CELL(ADD)
    }
    EACH_CELL(END)
#undef ROW
#undef BEGIN
#undef ADD
#undef END
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

void chunk_attention_share(const Chunk *chunk, uint32_t *room)
{
    const int64_t positions = chunk->start + chunk->tokens, tiles = (positions + TILE - 1) / TILE;
    const int64_t head_dim = chunk->head_dim, kv_heads = chunk->kv_heads, groups = chunk->groups;
    const int64_t tile_size = TILE * head_dim / 2, head_size = tiles * tile_size;
    uint32_t *const values_room = room + kv_heads * head_size;
    const int64_t block_tokens = BLOCK / groups, blocks = (chunk->tokens + block_tokens - 1) / block_tokens;
#pragma omp for
    for (int64_t task = 0; task < kv_heads * tiles; task++) {
        const int64_t head = task / tiles, at = task % tiles * TILE;
        const int n = positions - at < TILE ? positions - at : TILE;
        pack_keys(room + task * tile_size, chunk->k + head * chunk->k_stride + at * head_dim, n, head_dim);
        pack_values(values_room + task * tile_size, chunk->v + head * chunk->v_stride + at * head_dim, n, head_dim);
    }
    Block block;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < kv_heads * blocks; task++) {
        /* The longest rows first: no thread is left with one at the end. */
        const int64_t head = task % kv_heads, token = (blocks - 1 - task / kv_heads) * block_tokens;
        const int64_t n = (chunk->tokens - token < block_tokens ? chunk->tokens - token : block_tokens) * groups;
        const int rows = (n + ROWS - 1) / ROWS * ROWS;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t real = r < n ? r : n - 1, t = token + real / groups, g = head * groups + real % groups;
            block.queries[r] = (const uint32_t *)(chunk->q + t * chunk->q_stride + g * head_dim);
            block.weight_rows[r] = (const uint32_t *)block.weights[r];
            block.positions[r] = chunk->start + t;
            block.most[r] = -INFINITY;
            block.total[r] = 0;
            memset(block.mixed + r * head_dim, 0, head_dim * sizeof(float));
        }
        attend_block(&block, rows, room + head * head_size, values_room + head * head_size, chunk->window, head_dim,
                     chunk->scaling * 1.44269504f);
        for (int64_t r = 0; r < n; r++) {
            const int64_t t = token + r / groups, g = head * groups + r % groups;
            bf16 *to = chunk->out + (t * kv_heads * groups + g) * head_dim;
            const float share = 1.0f / block.total[r];
            for (int64_t i = 0; i < head_dim; i += LANES)
                store(to + i, *(floats *)(block.mixed + r * head_dim + i) * share);
        }
    }
}

void chunk_attention(const Chunk *chunk, uint32_t *room, int threads)
{
#pragma omp parallel num_threads(threads) if (threads > 1)
    chunk_attention_share(chunk, room);
}
#endif
