/* Reads a product from its descriptors and refuses it like the libraries. */
#include "fake.h"

#include <string.h>

int lt_size(int type) {
    switch (type) {
    case R_8I:
    case R_E4M3: return 1;
#ifdef FAKE_HIPBLASLT
    case R_E4M3_FNUZ: return 1;
#endif
    case R_16F:
    case R_16BF: return 2;
    case R_32F:
    case R_32I: return 4;
    default: return 0;
    }
}

int lt_is_fp8(int type) { return type == R_E4M3 || type == R_E4M3_FNUZ; }

static int matrix(const Object *layout, char name, Matrix *out) {
    *out = (Matrix){
        .type = (int)lt_get(layout, L_TYPE), .order = (int)lt_get(layout, L_ORDER), .rows = lt_get(layout, L_ROWS),
        .cols = lt_get(layout, L_COLS), .ld = lt_get(layout, L_LD), .stride = lt_get(layout, L_STRIDE),
    };
    char text[2] = {name, 0};
    int status = lt_only_computed(layout, text);
    if (status) {
        return status;
    }
    if (!lt_size(out->type)) {
        return lt_refuse(NOT_SUPPORTED, "the type %d of %c is none of this library's", out->type, name);
    }
    if (out->rows <= 0 || out->cols <= 0 || out->rows > INT32_MAX || out->cols > INT32_MAX) {
        return lt_refuse(INVALID_VALUE, "%c is %lld x %lld", name, (long long)out->rows, (long long)out->cols);
    }
    if (out->ld < out->rows) {
        return lt_refuse(INVALID_VALUE, "the leading dimension %lld of %c is below its %lld rows", (long long)out->ld, name, (long long)out->rows);
    }
    return SUCCESS;
}

/* Memory orders: column-major; on AMD also two tiled orders of A, 16 columns by 4 packs of 16 bytes. */
static int orders(const Problem *p) {
    if (p->b.order != ORDER_COL || p->c.order != ORDER_COL || p->d.order != ORDER_COL) {
        return lt_refuse(NOT_SUPPORTED, "B, C and D must be column-major (orders %d, %d, %d)", p->b.order, p->c.order, p->d.order);
    }
#ifdef FAKE_HIPBLASLT
    int bytes = p->a.order == ORDER_COL16_4R8 ? 2 : p->a.order == ORDER_COL16_4R16 ? 1 : 0;
    if (bytes) {
        int pack = 16 / bytes;
        if (lt_size(p->a.type) != bytes) {
            return lt_refuse(NOT_SUPPORTED, "order %d of A is for elements of %d bytes (type %d)", p->a.order, bytes, p->a.type);
        }
        if (!p->a.transposed || p->a.rows % (4 * pack) || p->a.cols % 16 || p->a.ld != p->a.rows || p->batch > 1) {
            return lt_refuse(NOT_SUPPORTED, "a tiled A must be transposed, not batched, packed, with rows a multiple of %d and columns of 16", 4 * pack);
        }
        return SUCCESS;
    }
#endif
    if (p->a.order != ORDER_COL) {
        return lt_refuse(NOT_SUPPORTED, "nothing here reads A in order %d", p->a.order);
    }
    return SUCCESS;
}

static int types(const Problem *p) {
    int in = p->a.type, out = p->d.type;
    if (p->b.type != in) {
        return lt_refuse(NOT_SUPPORTED, "A is of type %d, B of type %d", in, p->b.type);
    }
    if (p->c.type != out) {
        return lt_refuse(NOT_SUPPORTED, "C is of type %d, D of type %d", p->c.type, out);
    }
    int fits = in == R_8I ? out == R_32I : lt_is_fp8(in) ? out == R_16BF || out == R_16F || out == R_32F : out == in || out == R_32F;
    if (!fits || in == R_32I) {
        return lt_refuse(NOT_SUPPORTED, "no product of type %d is stored as type %d", in, out);
    }
    if (in == R_8I) {
        if (p->compute != COMPUTE_32I || p->scale_type != R_32I) {
            return lt_refuse(NOT_SUPPORTED, "int8 computes in int32 with int32 alpha and beta (computation %d, scale type %d)", p->compute, p->scale_type);
        }
    } else if ((p->compute != COMPUTE_32F && !(p->compute == COMPUTE_32F_TF32 && in == R_32F)) || p->scale_type != R_32F) {
        return lt_refuse(NOT_SUPPORTED, "type %d computes in float with float alpha and beta (computation %d, scale type %d)", in, p->compute, p->scale_type);
    }
    return SUCCESS;
}

/* cuBLAS manual, cublasLtMatmul: fp8 needs op T, N and an alignment of 16 bytes. Plain int8 needs op
 * T, N and leading dimensions, m and k divisible by 4. */
static int shapes_of_types(const Problem *p) {
#ifdef FAKE_CUBLASLT
    int out = lt_size(p->d.type);
    if (lt_is_fp8(p->a.type)) {
        if (!p->a.transposed || p->b.transposed) {
            return lt_refuse(NOT_SUPPORTED, "fp8 wants A transposed and B not");
        }
        if (p->k % 16 || p->a.ld % 16 || p->b.ld % 16 || p->m * out % 16 || p->c.ld * out % 16 || p->d.ld * out % 16) {
            return lt_refuse(NOT_SUPPORTED, "fp8 wants k, m and leading dimensions of 16 bytes (m %lld, k %lld, ld %lld %lld %lld %lld)",
                             (long long)p->m, (long long)p->k, (long long)p->a.ld, (long long)p->b.ld, (long long)p->c.ld, (long long)p->d.ld);
        }
    }
    if (p->a.type == R_8I && (!p->a.transposed || p->b.transposed || p->m % 4 || p->k % 4 || p->a.ld % 4 || p->b.ld % 4 || p->d.ld % 4)) {
        return lt_refuse(NOT_SUPPORTED, "int8 wants A transposed, B not, and m, k and leading dimensions divisible by 4");
    }
#else
    (void)p;
#endif
    return SUCCESS;
}

static int batches(const Problem *p) {
    if (p->batch == 1) {
        return SUCCESS;
    }
    const Matrix *all[] = {&p->a, &p->b, &p->c, &p->d};
    for (int i = 0; i < 4; i++) {
        int64_t rows = all[i]->rows, ld = all[i]->ld, stride = all[i]->stride, whole = ld * (all[i]->cols - 1) + rows;
        int apart = stride >= whole, interleaved = stride >= rows && ld >= stride * (p->batch - 1) + rows, same = !stride && i < 3;
        if (!apart && !interleaved && !same) {
            return lt_refuse(INVALID_VALUE, "matrices %lld elements apart overlap: %lld x %lld, ld %lld, %lld of them in %c", (long long)stride,
                             (long long)rows, (long long)all[i]->cols, (long long)ld, (long long)p->batch, "ABCD"[i]);
        }
    }
    return SUCCESS;
}

static int epilogue(const Problem *p) {
    if (p->epilogue == EPILOGUE_DEFAULT) {
        return SUCCESS;
    }
    if (p->epilogue != EPILOGUE_BIAS) {
        return lt_refuse(NOT_SUPPORTED, "nothing here computes the epilogue %d", p->epilogue);
    }
    int given = p->bias_type, out = p->d.type;
    if (p->a.type == R_8I) {
        return lt_refuse(NOT_SUPPORTED, "int8 products take no bias");
    }
    if (p->batch == 1 ? 0 : p->bias_stride && p->bias_stride < p->m) {
        return lt_refuse(INVALID_VALUE, "biases %lld apart overlap, they have %lld elements", (long long)p->bias_stride, (long long)p->m);
    }
#ifdef FAKE_CUBLASLT
    int wanted = lt_is_fp8(p->a.type) && out == R_32F ? R_16BF : out;
    if (given != wanted) {
        return lt_refuse(NOT_SUPPORTED, "a bias of type %d does not go with type %d stored as type %d (wanted %d)", given, p->a.type, out, wanted);
    }
#else
    if (given != out && given != R_32F) {
        return lt_refuse(NOT_SUPPORTED, "a bias is of D's type %d or float (got %d)", out, given);
    }
#endif
    return SUCCESS;
}

static int scales(const Problem *p) {
    int a = p->mode_a, b = p->mode_b, fp8 = lt_is_fp8(p->a.type);
    if (!fp8 && (p->scale_a || p->scale_b)) {
        return lt_refuse(INVALID_VALUE, "scale pointers are for fp8 (type %d)", p->a.type);
    }
    if (a == SCALE_SCALAR && b == SCALE_SCALAR) {
        return SUCCESS;
    }
    int outer = a == SCALE_OUTER_VEC && b == SCALE_OUTER_VEC;
    int blocks = (a == SCALE_VEC128 && (b == SCALE_VEC128 || b == SCALE_BLK128)) || (a == SCALE_BLK128 && b == SCALE_VEC128);
    if (!fp8 || (!outer && !blocks)) {
        return lt_refuse(NOT_SUPPORTED, "scale modes %d of A and %d of B do not go together for type %d", a, b, p->a.type);
    }
    if (p->batch > 1) {
        return lt_refuse(NOT_SUPPORTED, "only one scale for a whole matrix goes with batches (modes %d, %d)", a, b);
    }
#ifdef FAKE_CUBLASLT /* cuBLAS manual, 128-element scaling factors */
    if ((a == SCALE_VEC128 && p->m % 4) || (b == SCALE_VEC128 && p->n % 4)) {
        return lt_refuse(NOT_SUPPORTED, "rows with scales of 1x128 come in fours (m %lld, n %lld)", (long long)p->m, (long long)p->n);
    }
#endif
#ifdef FAKE_HIPBLASLT
    if (blocks && lt_setting("FAKE_LT_BLOCKSCALES", 0) == 0) { /* hipblaslt.h says so of both modes */
        return lt_refuse(NOT_SUPPORTED, "scales of blocks (modes %d, %d) are not supported yet", a, b);
    }
#endif
    return SUCCESS;
}

static int operation(int64_t op, char name, int *transposed) {
    *transposed = op == OP_T;
    if (op != OP_N && op != OP_T) {
        return lt_refuse(op == OP_C ? NOT_SUPPORTED : INVALID_VALUE, "operation %lld of %c is none of N and T", (long long)op, name);
    }
    return SUCCESS;
}

static int sizes(Problem *p, const Object *const layouts[4]) {
    p->m = p->a.transposed ? p->a.cols : p->a.rows;
    p->k = p->a.transposed ? p->a.rows : p->a.cols;
    p->n = p->b.transposed ? p->b.rows : p->b.cols;
    if ((p->b.transposed ? p->b.cols : p->b.rows) != p->k) {
        return lt_refuse(INVALID_VALUE, "op(A) is %lld x %lld, op(B) has %lld rows", (long long)p->m, (long long)p->k,
                         (long long)(p->b.transposed ? p->b.cols : p->b.rows));
    }
    if (p->d.rows != p->m || p->d.cols != p->n || p->c.rows != p->m || p->c.cols != p->n) {
        return lt_refuse(INVALID_VALUE, "C and D must be %lld x %lld", (long long)p->m, (long long)p->n);
    }
    p->batch = lt_get(layouts[3], L_BATCH);
    for (int i = 0; i < 4; i++) {
        if (p->batch < 1 || lt_get(layouts[i], L_BATCH) != p->batch) {
            return lt_refuse(INVALID_VALUE, "%c has %lld matrices, D %lld", "ABCD"[i], (long long)lt_get(layouts[i], L_BATCH), (long long)p->batch);
        }
    }
    return SUCCESS;
}

int lt_problem(const Object *handle, const Object *desc, const Object *a, const Object *b, const Object *c, const Object *d, Problem *out) {
    const Object *const layouts[4] = {a, b, c, d};
    if (!lt_is(handle, HANDLE)) {
        return lt_refuse(NOT_INITIALIZED, "this is no live handle");
    }
    if (!lt_is(desc, DESC)) {
        return lt_refuse(INVALID_VALUE, "this is no live matmul descriptor");
    }
    for (int i = 0; i < 4; i++) {
        if (!lt_is(layouts[i], LAYOUT)) {
            return lt_refuse(INVALID_VALUE, "%c has no live matrix layout", "ABCD"[i]);
        }
    }
    *out = (Problem){
        .compute = (int)lt_get(desc, D_COMPUTE), .scale_type = (int)lt_get(desc, D_SCALE_TYPE), .epilogue = (int)lt_get(desc, D_EPILOGUE),
        .bias_type = (int)lt_get(desc, D_BIAS_TYPE), .bias_stride = lt_get(desc, D_BIAS_STRIDE), .bias = (const void *)lt_get(desc, D_BIAS),
        .mode_a = (int)lt_get(desc, D_MODE_A), .mode_b = (int)lt_get(desc, D_MODE_B),
        .scale_a = (const float *)lt_get(desc, D_SCALE_A), .scale_b = (const float *)lt_get(desc, D_SCALE_B),
    };
    int status = lt_only_computed(desc, "one");
    status = status ? status : matrix(a, 'A', &out->a);
    status = status ? status : matrix(b, 'B', &out->b);
    status = status ? status : matrix(c, 'C', &out->c);
    status = status ? status : matrix(d, 'D', &out->d);
    status = status ? status : operation(lt_get(desc, D_OP_A), 'A', &out->a.transposed);
    status = status ? status : operation(lt_get(desc, D_OP_B), 'B', &out->b.transposed);
    status = status ? status : sizes(out, layouts);
    if (!status && lt_get(desc, D_POINTER_MODE) != 0 && lt_get(desc, D_POINTER_MODE) != 1) {
        status = lt_refuse(NOT_SUPPORTED, "alpha and beta are single values here (pointer mode %lld)", (long long)lt_get(desc, D_POINTER_MODE));
    }
    if (out->bias_type == NO_TYPE) { /* unset: as D, except fp8 stored as float, see cublasLt.h */
        out->bias_type = lt_is_fp8(out->a.type) && out->d.type == R_32F ? R_16BF : out->d.type;
    }
    status = status ? status : types(out);
    status = status ? status : orders(out);
    status = status ? status : shapes_of_types(out);
    status = status ? status : batches(out);
    status = status ? status : epilogue(out);
    return status ? status : scales(out);
}
