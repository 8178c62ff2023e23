/* Decoder layers of the Llama family: norm, products, rotation and, in a decode step, attention; absent without
 * AVX512-BF16.
 */
#include "team.h"
#ifdef __AVX512BF16__

typedef struct {
    int64_t size, heads, kv_heads, head_dim, inner; /* of rows between layers; of the MLP */
} Shape;

/* Weights as products.c has them; gate_up in panels of both. A bias may be NULL. window: 0 for none. */
typedef struct {
    const bf16 *norm;
    const uint32_t *qkv;
    const bf16 *qkv_bias;
    const uint32_t *attended;
    const bf16 *attended_bias;
    const bf16 *mlp_norm;
    const uint32_t *gate_up;
    const bf16 *gate_up_bias;
    const uint32_t *down;
    const bf16 *down_bias;
    int64_t window;
    float norm_eps, mlp_norm_eps, scaling;
} Layer;

/* Rows on their way through layers, and room to work. */
typedef struct {
    bf16 *hidden;          /* (m, size), changed in place */
    const bf16 *cos, *sin; /* (m, head_dim) */
    bf16 *normed;          /* (m, size) */
    bf16 *qkv;             /* (m, (heads + 2 * kv_heads) * head_dim) */
    bf16 *attended;        /* (m, heads * head_dim) */
    bf16 *gated;           /* (m, inner) */
    int64_t m;
} Rows;

/* From hidden to qkv, queries and keys turned. */
static void before_attention_share(const Shape *shape, const Layer *layer, const Rows *rows)
{
    const int64_t heads = shape->heads + 2 * shape->kv_heads, columns = heads * shape->head_dim;
    rms_norm_share(rows->hidden, layer->norm, rows->normed, rows->m, shape->size, layer->norm_eps);
    multiply_share(&(Product){.rows = rows->normed, .weights = layer->qkv, .bias = layer->qkv_bias, .out = rows->qkv,
                              .m = rows->m, .columns = columns, .inner = shape->size});
    rotate_share(rows->qkv, rows->cos, rows->sin, rows->m, columns, shape->heads + shape->kv_heads, shape->head_dim);
}

/* From attended, added to hidden, through the MLP. */
static void after_attention_share(const Shape *shape, const Layer *layer, const Rows *rows)
{
    multiply_share(&(Product){.rows = rows->attended, .weights = layer->attended, .bias = layer->attended_bias,
                              .summands = rows->hidden, .out = rows->hidden, .m = rows->m, .columns = shape->size,
                              .inner = shape->heads * shape->head_dim});
    rms_norm_share(rows->hidden, layer->mlp_norm, rows->normed, rows->m, shape->size, layer->mlp_norm_eps);
    multiply_share(&(Product){.rows = rows->normed, .weights = layer->gate_up, .bias = layer->gate_up_bias,
                              .out = rows->gated, .m = rows->m, .columns = 2 * shape->inner, .inner = shape->size,
                              .gated = 1});
    multiply_share(&(Product){.rows = rows->gated, .weights = layer->down, .bias = layer->down_bias,
                              .summands = rows->hidden, .out = rows->hidden, .m = rows->m, .columns = shape->size,
                              .inner = shape->inner});
}

void before_attention(const Shape *shape, const Layer *layer, const Rows *rows, int threads)
{
#pragma omp parallel num_threads(threads) if (threads > 1)
    before_attention_share(shape, layer, rows);
}

void after_attention(const Shape *shape, const Layer *layer, const Rows *rows, int threads)
{
#pragma omp parallel num_threads(threads) if (threads > 1)
    after_attention_share(shape, layer, rows);
}

/* Layers `first` to `end` of `layers` for one token of each sequence: rows of one token each, whose K and V go to their
 * places in the contexts (see token_attention.c). */
void decode_layers(const Shape *shape, const Layer *layers, int64_t first, int64_t end, const Rows *rows,
                   const int64_t *contexts, const int64_t *capacities, const int64_t *positions, int threads)
{
    const int64_t stride = (shape->heads + 2 * shape->kv_heads) * shape->head_dim;
    const bf16 *keys = rows->qkv + shape->heads * shape->head_dim;
    const Tokens tokens = {
        .q = rows->qkv, .k = keys, .v = keys + shape->kv_heads * shape->head_dim,
        .q_stride = stride, .k_stride = stride, .v_stride = stride, .out = rows->attended,
        .contexts = contexts, .capacities = capacities, .positions = positions, .batch = rows->m,
        .kv_heads = shape->kv_heads, .groups = shape->heads / shape->kv_heads, .head_dim = shape->head_dim,
    };
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t index = first; index < end; index++) {
        const Layer *layer = layers + index;
        before_attention_share(shape, layer, rows);
        token_attention_share(&tokens, index, layer->window, layer->scaling);
        after_attention_share(shape, layer, rows);
    }
}

/* The rows' K and V go to positions `start` onwards of k and v (kv_heads, capacity, head_dim). */
static void keep_share(const Shape *shape, const Rows *rows, bf16 *k, bf16 *v, int64_t capacity, int64_t start)
{
    const int64_t head_dim = shape->head_dim, stride = (shape->heads + 2 * shape->kv_heads) * head_dim;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows->m; row++)
        for (int64_t h = 0; h < shape->kv_heads; h++) {
            const bf16 *key = rows->qkv + row * stride + (shape->heads + h) * head_dim;
            const int64_t to = (h * capacity + start + row) * head_dim;
            memcpy(k + to, key, head_dim * sizeof(bf16));
            memcpy(v + to, key + shape->kv_heads * head_dim, head_dim * sizeof(bf16));
        }
}

/* The same for a chunk of one sequence, at positions `start` onwards. context: (end - first, K or V, kv_heads,
 * capacity, head_dim); room as in chunk_attention_share. */
void chunk_layers(const Shape *shape, const Layer *layers, int64_t first, int64_t end, const Rows *rows, bf16 *context,
                  int64_t capacity, int64_t start, uint32_t *room, int threads)
{
    const int64_t side = shape->kv_heads * capacity * shape->head_dim;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t index = first; index < end; index++) {
        const Layer *layer = layers + index;
        bf16 *k = context + 2 * (index - first) * side, *v = k + side;
        before_attention_share(shape, layer, rows);
        keep_share(shape, rows, k, v, capacity, start);
        chunk_attention_share(
            &(Chunk){.q = rows->qkv, .k = k, .v = v, .q_stride = (shape->heads + 2 * shape->kv_heads) * shape->head_dim,
                     .k_stride = capacity * shape->head_dim, .v_stride = capacity * shape->head_dim,
                     .out = rows->attended, .tokens = rows->m, .start = start, .kv_heads = shape->kv_heads,
                     .groups = shape->heads / shape->kv_heads, .head_dim = shape->head_dim, .window = layer->window,
                     .scaling = layer->scaling},
            room);
        after_attention_share(shape, layer, rows);
    }
}
#endif
