import assert from "node:assert/strict";
import { test } from "node:test";
import { BitMatrix, decodeBytes, decodeFloats, weightFromByte } from "../src/wire.ts";

test("base64 is decoded to bytes", () => {
  assert.deepEqual([...decodeBytes("AAEC/w==")], [0, 1, 2, 255]);
});

test("floats are little-endian", () => {
  assert.deepEqual([...decodeFloats("AACAPwAAAMAAAIB/")], [1, -2, Infinity]);
});

test("each row of bits starts at a byte, the highest bit first", () => {
  const bits = new BitMatrix(new Uint8Array([0b10000000, 0b01000000, 0b00000001, 0b10000000]), 2, 10);
  assert.equal(bits.at(0, 0), true);
  assert.equal(bits.at(0, 1), false);
  assert.equal(bits.at(0, 9), true);
  assert.equal(bits.at(1, 7), true);
  assert.equal(bits.at(1, 8), true);
  assert.equal(bits.at(1, 9), false);
});

test("too few bits are refused", () => {
  assert.throws(() => new BitMatrix(new Uint8Array(3), 2, 10), /3 bytes/);
});

test("a byte is the square root of a weight", () => {
  assert.equal(weightFromByte(255), 1);
  assert.equal(weightFromByte(0), 0);
  assert.ok(Math.abs(weightFromByte(128) - 0.252) < 0.001);
});
