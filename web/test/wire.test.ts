import assert from "node:assert/strict";
import { test } from "node:test";
import { Bits, bytes, floats, weight } from "../src/wire.ts";

test("bytes come as they were", () => {
  assert.deepEqual([...bytes("AAEC/w==")], [0, 1, 2, 255]);
});

test("floats are little-endian", () => {
  assert.deepEqual([...floats("AACAPwAAAMAAAIB/")], [1, -2, Infinity]);
});

test("each row of bits begins with a whole byte, the highest bit first", () => {
  const bits = new Bits(new Uint8Array([0b10000000, 0b01000000, 0b00000001, 0b10000000]), 2, 10);
  assert.equal(bits.at(0, 0), true);
  assert.equal(bits.at(0, 1), false);
  assert.equal(bits.at(0, 9), true);
  assert.equal(bits.at(1, 7), true);
  assert.equal(bits.at(1, 8), true);
  assert.equal(bits.at(1, 9), false);
});

test("too few bits are refused", () => {
  assert.throws(() => new Bits(new Uint8Array(3), 2, 10), /3 bytes/);
});

test("a byte is the root of its weight", () => {
  assert.equal(weight(255), 1);
  assert.equal(weight(0), 0);
  assert.ok(Math.abs(weight(128) - 0.252) < 0.001);
});
