/* Weights to 4 or 8 bits in groups of 64 along the input columns, in the block order of proto/weights.h.
 *
 * A matrix has one exponent e; a group has an f16 scale s; weight ~ quantum * s * 2^e. Everything here works on rows
 * that were multiplied by 2^-e already, and uses + - * / and comparisons on f32 only, so the bytes are the same on
 * every machine. Any thread. */
#pragma once

#include "proto/weights.h"

/* The exponent of a matrix whose largest magnitude is `absmax` (finite): the largest scale that a group can need
 * comes close under f16's largest value, which leaves the most room before small groups get subnormal scales. 0 for a
 * matrix of zeros. */
int quantise_exponent(enum weight_format format, float absmax);

/* Quantises one block row: `rows` is [16][k] f32, not yet multiplied by 2^-exponent, finite.
 * ret_quanta: [k / 64] blocks of block_bytes(format); ret_scales: f16 [k / 64][16]. */
void quantise_block_row(enum weight_format format, int exponent, const float *rows, uint32_t k, uint8_t *ret_quanta,
                        uint16_t *ret_scales);

/* Quantises one group of 64 values that were multiplied by 2^-exponent. Returns the f16 scale; quanta are -8..7 or
 * -127..127. int4: of all candidate scales the one with the least squared error; values that 4 bits hold exactly with
 * some f16 scale stay exact. int8: absmax / 127, or a scale that is exact where there is one. */
uint16_t quantise_group(enum weight_format format, const float *values, int8_t *ret_quanta);
