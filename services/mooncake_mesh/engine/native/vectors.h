/* Vectors of 16 floats, and rows of bfloat16 as such.
 *
 * They are GCC's, which the compiler cuts to what the processor has. Sums are float32 throughout; results are rounded
 * once.
 */
#ifndef MOONCAKE_VECTORS_H
#define MOONCAKE_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

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

#endif
