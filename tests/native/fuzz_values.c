/* Random values, memory and comparisons of the fuzz. */

#define _POSIX_C_SOURCE 200112L

#include "fuzz.h"

#include <stdio.h>

int kind, bfloat16_pairs, vnni;

static uint64_t state;

void seed(uint64_t number) { state = 88172645463325252u + number; }

uint32_t draw(uint32_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)((state >> 16) % below);
}

int64_t between(int64_t low, int64_t high) { return low + draw((uint32_t)(high - low + 1)); }
int64_t size_of(int64_t type) { return type == FLOAT32 ? 4 : type == INT8 ? 1 : 2; }

void fail(const char *what) {
    fprintf(stderr, "fuzz: kernels of kind %d: %s\n", kind, what);
    exit(1);
}

#define TEAM 8 /* most threads of a launch */

int team(void) { return (int)between(1, TEAM); }

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

float widened(uint16_t bits) { return from_bits((uint32_t)bits << 16); }

static float some_float(int wild) {
    if (!wild || draw(40)) return ((float)draw(20001) - 10000) / 4096;
    switch (draw(8)) {
        case 0: return from_bits(0x7fc00000);
        case 1: return from_bits(0x7f800000);
        case 2: return from_bits(0xff800000);
        case 3: return from_bits(0x80000000);
        case 4: return from_bits(draw(0x7fffff));
        case 5: return 3.0e38f;
        case 6: return -3.0e38f;
        default: return from_bits(draw(0xffffffff));
    }
}

/* Memory of exactly so many bytes, at a multiple of 64 where `lines`; freed by `drop`. */
static void *held[1024];
static int holding;
void *room(int64_t bytes, int lines) {
    void *made = NULL;
    if (holding == sizeof held / sizeof *held) fail("a case holds too many blocks of memory");
    if (lines ? posix_memalign(&made, 64, (size_t)bytes) : !(made = malloc((size_t)(bytes ? bytes : 1))))
        fail("no memory");
    return held[holding++] = made;
}
void drop(void) {
    while (holding) free(held[--holding]);
}

void *some(int64_t count, int64_t type, int wild) {
    void *made = room(count * size_of(type), 0);
    for (int64_t i = 0; i < count; i++) {
        const float value = some_float(wild);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        if (type == FLOAT32)
            ((float *)made)[i] = value;
        else if (type == BFLOAT16)
            ((uint16_t *)made)[i] = (uint16_t)(bits >> 16);
        else if (type == FLOAT16)
            ((uint16_t *)made)[i] =
                (uint16_t)(wild && !draw(40) ? draw(65536) : 0x3000 + draw(0xc00) + (draw(2) << 15));
        else
            ((int8_t *)made)[i] = (int8_t)((int)draw(256) - 128);
    }
    return made;
}

void *copied(const void *from, int64_t bytes) { return memcpy(room(bytes, 0), from, (size_t)bytes); }

void equal(const void *a, const void *b, int64_t bytes, const char *what) {
    if (memcmp(a, b, (size_t)bytes)) fail(what);
}

#define BLOCK 32 /* values of a group of MXFP4 */

/* Codes of a weight [rows][inputs]: of 8 bits, of 4, or (`looked`) of 4 bits in a table. */
void some_codes(PanelWeight *w, int64_t rows, int64_t inputs, int64_t type, int looked) {
    const int64_t bits = looked || draw(2) ? 4 : 8, whole = draw(3) ? STEP : BLOCK;
    const int64_t columns = (inputs + whole - 1) / whole * whole, panels = (rows + PANEL - 1) / PANEL;
    *w = (PanelWeight){.rows = rows, .inputs = inputs, .columns = columns, .bits = bits};
    w->group = whole == BLOCK ? BLOCK : draw(2) ? columns : STEP * between(1, columns / STEP);
    const int64_t groups = groups_of(w), held_bytes = panels * columns * PANEL * bits / 8;
    uint8_t *codes = room(held_bytes, 0), *zero = room(panels * groups * PANEL, 0);
    for (int64_t i = 0; i < held_bytes; i++) codes[i] = (uint8_t)draw(256);
    for (int64_t i = 0; i < panels * groups * PANEL; i++) zero[i] = (uint8_t)draw(bits == 8 ? 256 : 16);
    w->codes = codes, w->factor = some(panels * PANEL, FLOAT32, 0);
    w->scale = groups > 1 || draw(2) ? some(panels * groups * PANEL, FLOAT16, 0) : NULL;
    w->middle = bits == 8 ? 128 : draw(16);
    if (looked) {
        uint8_t *values = room(16, 0), *exponents = room(panels * groups * PANEL, 0);
        for (int i = 0; i < 16; i++) values[i] = (uint8_t)draw(32);
        for (int64_t i = 0; i < panels * groups * PANEL; i++)
            exponents[i] = (uint8_t)(draw(20) ? 127 - draw(12) : draw(128));
        w->values = values, w->scale = exponents;
    }
    w->zero = draw(2) ? zero : NULL, w->bias = draw(2) ? some(rows, type, 1) : NULL;
    if (draw(3) == 0) {
        int32_t *gather = room(columns * 4, 0);
        for (int64_t i = 0; i < columns; i++) gather[i] = (int32_t)draw((uint32_t)inputs + 1) - 1;
        w->gather = gather;
    }
}

/* A dense weight of random values, packed. */
void some_dense(Dense *p, int64_t outputs, int64_t inputs, int64_t type, int wild) {
    const int64_t unit = type == FLOAT32 ? 16 : 32, depth = (inputs + unit - 1) / unit * unit;
    const int64_t panels = (outputs + DENSE_PANEL - 1) / DENSE_PANEL, count = panels * DENSE_PANEL * depth;
    const void *values = some(count, type, wild);
    *p = (Dense){.inputs = inputs, .depth = depth, .outputs = outputs, .type = type};
    p->weight = memcpy(room(count * size_of(type), 1), values, (size_t)(count * size_of(type)));
    p->pairs = bfloat16_pairs && draw(3), p->bias = draw(2) ? some(outputs, type, wild) : NULL;
}
