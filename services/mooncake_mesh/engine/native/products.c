/* Products of rows and weights, by AVX512-BF16; absent without it.
 *
 * Few rows take as long as memory needs for the weights, many as long as the processor needs for the sums: one order of
 * the weights serves both. A sum adds up along `inner` in the same order however many rows there are, so a row's result
 * is the same in every batch.
 */
#include "team.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#include <omp.h>

enum {
    PANEL = 2 * LANES, /* columns whose weights lie together */
    ROWS = 12,         /* of one product: with a panel's two vectors each, the sums fill the registers */
    BLOCK_ROWS = 240,  /* that all panels of a thread are multiplied with in turn: they stay in its cache */
    MANY_ROWS = 96,    /* from which on a panel takes so long that a thread which lost its core leaves some to others */
    AHEAD = 64,        /* pairs: how far before its use a weight is fetched from memory for few rows */
    LINE = 64,         /* bytes that memory gives at a time; a panel has two for each pair */
};

/* weights (columns, inner), whole panels, as (columns / PANEL, inner / 2, PANEL) pairs: neighbours along inner. */
void pack_weights(const uint32_t *weights, uint32_t *out, int64_t columns, int64_t inner)
{
    const int64_t pairs = inner / 2;
    for (int64_t panel = 0; panel < columns / PANEL; panel++)
        for (int64_t p = 0; p < pairs; p++)
            for (int64_t i = 0; i < PANEL; i++)
                out[(panel * pairs + p) * PANEL + i] = weights[(panel * PANEL + i) * pairs + p];
}

INLINE void write(bf16 *to, __m512 x)
{
    const __m256bh rounded = _mm512_cvtneps_pbh(x);
    memcpy(to, &rounded, sizeof rounded);
}

INLINE __m512 silu(__m512 x)
{
    const floats f = (floats)x, e = exp_of(choose(f < all(0), f, -f));
    return (__m512)(f * choose(f < all(0), e, all(1)) / (all(1) + e));
}

/* The sums of one row and panel become elements of `out`. */
static void finish(const Product *to, int64_t row, int64_t panel, __m512 low, __m512 high)
{
    const int64_t column = panel * PANEL, at = row * to->columns + column;
    const int64_t there = to->columns - column;
    if (to->bias) { /* (columns, rounded up to whole panels) */
        low += (__m512)load(to->bias + column);
        high += (__m512)load(to->bias + column + LANES);
    }
    if (to->gated) {
        write(to->out + row * (to->columns / 2) + panel * LANES, silu(low) * high);
    } else if (there >= PANEL) {
        if (to->summands) {
            low += (__m512)load(to->summands + at);
            high += (__m512)load(to->summands + at + LANES);
        }
        write(to->out + at, low);
        write(to->out + at + LANES, high);
    } else {
        bf16 part[PANEL] = {};
        if (to->summands) {
            memcpy(part, to->summands + at, there * sizeof(bf16));
            low += (__m512)load(part);
            high += (__m512)load(part + LANES);
        }
        write(part, low);
        write(part + LANES, high);
        memcpy(to->out + at, part, there * sizeof(bf16));
    }
}

#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

/* Weights to fetch from memory meanwhile, `step` bytes further each time. */
typedef struct {
    const char *from;
    int64_t step;
} Fetch;

/* sums (ROWS, PANEL) of `rows` rows from `first` on and one panel. `rows` and `lines` are constants wherever this is
 * inlined. Every sum has a name: GCC writes those of an array to memory in every round. */
INLINE void multiply(const Product *product, int64_t first, int64_t panel, float (*sums)[PANEL], const Fetch *fetch,
                     const int rows, const int lines)
{
    const int64_t pairs = product->inner / 2;
    const uint32_t *weights = product->weights + panel * pairs * PANEL;
    const uint32_t *const from = (const uint32_t *)product->rows + first * pairs;
    const char *next = fetch->from;
#define BEGIN(r)                                             \
    const uint32_t *const row##r = from + (r < rows ? r : 0) * pairs; \
    __m512 low##r = _mm512_setzero_ps(), high##r = low##r;
    EACH_ROW(BEGIN)
    for (int64_t p = 0; p < pairs; p++, weights += PANEL) {
        const __m512bh left = (__m512bh)_mm512_loadu_si512(weights);
        const __m512bh right = (__m512bh)_mm512_loadu_si512(weights + LANES);
        __builtin_prefetch(next);
        if (lines == 2)
            __builtin_prefetch(next + LINE);
        next += fetch->step;
#define ADD(r)                                                              \
    if (r < rows) {                                                         \
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(row##r[p]);       \
        low##r = _mm512_dpbf16_ps(low##r, pair, left);                      \
        high##r = _mm512_dpbf16_ps(high##r, pair, right);                   \
    }
        EACH_ROW(ADD)
    }
#define END(r)                                        \
    if (r < rows) {                                   \
        _mm512_store_ps(sums[r], low##r);             \
        _mm512_store_ps(sums[r] + LANES, high##r);    \
    }
    EACH_ROW(END)
#undef BEGIN
#undef ADD
#undef END
}

INLINE void multiply_rows(const Product *product, int64_t first, int64_t panel, int rows, const Fetch *fetch,
                          const int lines)
{
    float sums[ROWS][PANEL] __attribute__((aligned(64)));
    switch (rows) {
#define CASE(r)                                                     \
    case r + 1:                                                     \
        multiply(product, first, panel, sums, fetch, r + 1, lines); \
        break;
        EACH_ROW(CASE)
#undef CASE
    }
    for (int r = 0; r < rows; r++)
        finish(product, first + r, panel, _mm512_load_ps(sums[r]), _mm512_load_ps(sums[r] + LANES));
}

/* One block of rows times one panel. With few rows there is time for no other weights than its own; else those of panel
 * `next`, which this thread will come to, are fetched a part with each of the parts of the block. */
static void multiply_panel(const Product *product, int64_t block, int64_t blocks, int64_t panel, int64_t next)
{
    const int64_t first = product->m * block / blocks, end = product->m * (block + 1) / blocks;
    const int64_t parts = (end - first + ROWS - 1) / ROWS, panel_bytes = product->inner * PANEL * sizeof(bf16);
    const char *weights = (const char *)product->weights;
    if (parts == 1) {
        const Fetch fetch = {.from = weights + panel * panel_bytes + AHEAD * 2 * LINE, .step = 2 * LINE};
        multiply_rows(product, first, panel, end - first, &fetch, 2);
        return;
    }
    Fetch fetch = {.from = weights + next * panel_bytes, .step = 2 * LINE / parts};
    for (int64_t left = parts, at = first; left > 0; left--, fetch.from += panel_bytes / parts) {
        const int rows = (end - at) / left;
        multiply_rows(product, at, panel, rows, &fetch, 1);
        at += rows;
    }
}

void multiply_share(const Product *product)
{
    const int64_t panels = (product->columns + PANEL - 1) / PANEL;
    const int64_t blocks = (product->m + BLOCK_ROWS - 1) / BLOCK_ROWS;
    if (product->m < MANY_ROWS) {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < blocks * panels; task++)
            multiply_panel(product, task / panels, blocks, task % panels, task % panels + 1);
    } else {
        const int threads = omp_get_num_threads();
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < blocks * panels; task++)
            multiply_panel(product, task / panels, blocks, task % panels, task % panels + threads);
    }
}

void product(const Product *product, int threads)
{
#pragma omp parallel num_threads(threads) if (threads > 1)
    multiply_share(product);
}
#endif
