/* Normalization and rotation of rows. */
#include "team.h"

enum { FEW_ROWS = 16 }; /* which one thread is done with before another has come */

/* Each row of `size`, a multiple of 16, divided by its root mean square and times `weight`. */
void rms_norm_share(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t size, float eps)
{
#pragma omp for schedule(static)
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

void rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t size, float eps, int threads)
{
#pragma omp parallel num_threads(threads) if (threads > 1 && rows >= FEW_ROWS)
    rms_norm_share(x, weight, out, rows, size, eps);
}

/* Turn the first `heads` heads of each row in place. cos and sin: (rows, head_dim). */
void rotate_share(bf16 *x, const bf16 *cos, const bf16 *sin, int64_t rows, int64_t row_stride, int64_t heads,
                  int64_t head_dim)
{
    const int64_t half = head_dim / 2;
#pragma omp for schedule(static)
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

void rotate(bf16 *x, const bf16 *cos, const bf16 *sin, int64_t rows, int64_t row_stride, int64_t heads,
            int64_t head_dim, int threads)
{
#pragma omp parallel num_threads(threads) if (threads > 1 && rows >= FEW_ROWS)
    rotate_share(x, cos, sin, rows, row_stride, heads, head_dim);
}
