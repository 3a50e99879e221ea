import assert from "node:assert/strict";
import { test } from "node:test";
import { chosen } from "../src/map/arcs.ts";
import { fit, isFit, moved, showing, visible, within, zoomed } from "../src/map/camera.ts";
import { nice } from "../src/map/labels.ts";
import { Recent } from "../src/map/lruCache.ts";
import { TiledMap } from "../src/map/tiledMap.ts";
import { corner, single, tiles, wantsTiles } from "../src/map/tiling.ts";
import { WholeMap } from "../src/map/inMemoryMap.ts";
import { Bits } from "../src/wire.ts";
import { Queue } from "../src/transport/requestQueue.ts";

const stage = { width: 500, height: 500, rows: 2000, columns: 2000 };

test("tiles cover a region, the middle first, and no more", () => {
  const found = tiles({ top: 250, left: 0, bottom: 600, right: 300 }, 2000, 2000, 256);
  assert.deepEqual(
    found.map(({ row, column }) => `${row},${column}`).sort(),
    ["0,0", "0,256", "256,0", "256,256", "512,0", "512,256"].sort(),
  );
  assert.deepEqual(found[0], { row: 256, column: 0 });
});

test("there are no tiles beyond the edge", () => {
  assert.deepEqual(tiles({ top: -50, left: 1900, bottom: 10, right: 2400 }, 2000, 2000, 256), [{ row: 0, column: 1792 }]);
  assert.deepEqual(corner(2000 - 1, 511), { row: 1792, column: 256 });
});

test("a small map is one tile, and a large one is tiled when its tokens are pixels", () => {
  assert.ok(single(256, 3) && !single(257, 3));
  assert.ok(!wantsTiles(0.4, 2, 2000, 2000) && wantsTiles(0.5, 2, 2000, 2000) && wantsTiles(0.1, 1, 100, 100));
});

test("all of it fits, and what is under the pointer stays there", () => {
  const all = fit(stage);
  assert.equal(all.scale, 0.25);
  const near = zoomed(all, stage, 8, { x: 300, y: 100 });
  assert.equal(near.scale, 2);
  assert.equal(near.x + 300 / near.scale, 1200);
  assert.equal(near.y + 100 / near.scale, 400);
  assert.deepEqual(visible(near, stage), { top: 350, left: 1050, bottom: 600, right: 1300 });
});

test("the camera never leaves the map", () => {
  const near = within({ x: 5000, y: -7, scale: 2 }, stage);
  assert.deepEqual(near, { x: 1750, y: 0, scale: 2 });
  assert.deepEqual(moved(near, stage, -10_000, 10_000), { x: 0, y: 1750, scale: 2 });
  assert.ok(isFit(zoomed(near, stage, 1e-6, { x: 0, y: 0 }), stage));
});

test("a cell that is out of sight is brought into it", () => {
  const camera = showing({ x: 0, y: 0, scale: 2 }, stage, 1000, 10);
  const see = visible(camera, stage);
  assert.ok(see.top <= 1000 && 1000 < see.bottom && see.left === 0);
});

test("the last few are kept", () => {
  const kept = new Recent<number>(2);
  kept.set("a", 1);
  kept.set("b", 2);
  kept.get("a");
  kept.set("c", 3);
  assert.deepEqual([kept.get("a"), kept.get("b"), kept.get("c"), kept.size], [1, undefined, 3, 2]);
});

test("numbers along an axis are round", () => {
  assert.deepEqual([0.5, 3, 34, 51, 99].map(nice), [1, 5, 50, 100, 100]);
});

test("arcs are the heaviest of what is in view, outside the claim or in it", () => {
  const bits = new Bits(new Uint8Array([0b10000000, 0b11000000]), 2, 2);
  const [piece] = new WholeMap(2, 2, Uint8Array.of(255, 128, 60, 10), bits).fine();
  assert.deepEqual(
    chosen([piece], 0.05, 0, 2).map(({ row, column, outside }) => [row, column, outside]),
    [
      [1, 0, false],
      [0, 1, true],
      [0, 0, false],
    ],
  );
  assert.deepEqual(chosen([piece], 0.05, 1, 2).length, 1);
});

test("a large map asks for the overview, then for what is looked at, once", async () => {
  const asked: string[] = [];
  const map = new TiledMap(
    { name: "decoder.self", layer: 0, head: 0 },
    600,
    600,
    (async (question: string, given: Record<string, unknown>) => {
      asked.push(question === "tile" ? `tile ${given.row},${given.column}` : question);
      if (question === "overview")
        return { rows: 600, columns: 600, step: 2, top: 0.25, map_u8: Buffer.alloc(90_000, 255).toString("base64") };
      const rows = Math.min(256, 600 - Number(given.row)),
        columns = Math.min(256, 600 - Number(given.column));
      return {
        row: given.row,
        column: given.column,
        rows,
        columns,
        map_u8: Buffer.alloc(rows * columns, 51).toString("base64"),
        claim_bits: Buffer.alloc(rows * Math.ceil(columns / 8), 255).toString("base64"),
      };
    }) as never,
    new Queue(2),
  );
  const settled = () =>
    new Promise<void>((resolve) => {
      const end = map.listen(() => {
        end();
        resolve();
      });
    });
  map.listen(() => undefined);
  const region = { top: 300, left: 0, bottom: 310, right: 20 };
  let news = settled();
  assert.deepEqual(map.fine(region), []);
  await news;
  news = settled();
  map.fine(region);
  map.fine(region);
  await news;
  assert.deepEqual(asked, ["overview", "tile 256,0"]);
  const reading = map.at(300, 5)!;
  assert.ok(Math.abs(reading.weight - 0.04) < 1e-9 && reading.exact && reading.allowed === true);
  assert.deepEqual(map.at(0, 0), { weight: 0.25, allowed: null, exact: false });
});

test("what is refused is not asked again in every frame", async () => {
  let asked = 0;
  const map = new TiledMap(
    { name: "n", layer: 0, head: 0 },
    10,
    10,
    (async () => {
      asked++;
      throw new Error("no such head");
    }) as never,
    new Queue(),
  );
  map.listen(() => undefined);
  for (let n = 0; n < 5; n++) {
    map.fine({ top: 0, left: 0, bottom: 10, right: 10 });
    await new Promise((resolve) => setImmediate(resolve));
  }
  assert.equal(asked, 1);
  assert.equal(map.error(), "no such head");
});
