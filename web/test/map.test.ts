import assert from "node:assert/strict";
import { test } from "node:test";
import { strongestArcs } from "../src/map/arcs.ts";
import {
  clampCamera,
  fitCamera,
  isFullyVisible,
  panCamera,
  revealCell,
  visibleRegion,
  zoomCamera,
} from "../src/map/camera.ts";
import { InMemoryMap } from "../src/map/inMemoryMap.ts";
import { roundUpTick } from "../src/map/labels.ts";
import { LruCache } from "../src/map/lruCache.ts";
import { TiledMap } from "../src/map/tiledMap.ts";
import { fitsOneTile, needsTiles, tileOrigin, tileOrigins } from "../src/map/tiling.ts";
import { RequestQueue } from "../src/transport/requestQueue.ts";
import { BitMatrix } from "../src/wire.ts";

const viewport = { width: 500, height: 500, rows: 2000, columns: 2000 };

test("tiles cover a region and no more, the centre first", () => {
  const origins = tileOrigins({ top: 250, left: 0, bottom: 600, right: 300 }, 2000, 2000, 256);
  assert.deepEqual(
    origins.map(({ row, column }) => `${row},${column}`).sort(),
    ["0,0", "0,256", "256,0", "256,256", "512,0", "512,256"].sort(),
  );
  assert.deepEqual(origins[0], { row: 256, column: 0 });
});

test("there are no tiles beyond the edge", () => {
  const region = { top: -50, left: 1900, bottom: 10, right: 2400 };
  assert.deepEqual(tileOrigins(region, 2000, 2000, 256), [{ row: 0, column: 1792 }]);
  assert.deepEqual(tileOrigin(2000 - 1, 511), { row: 1792, column: 256 });
});

test("a small map is one tile, a large one is tiled from one pixel per token on", () => {
  assert.ok(fitsOneTile(256, 3) && !fitsOneTile(257, 3));
  assert.ok(!needsTiles(0.4, 2, 2000, 2000) && needsTiles(0.5, 2, 2000, 2000));
  assert.ok(needsTiles(0.1, 1, 100, 100));
});

test("zooming keeps what is under the pointer in place", () => {
  const fitted = fitCamera(viewport);
  assert.equal(fitted.scale, 0.25);
  const zoomed = zoomCamera(fitted, viewport, 8, { x: 300, y: 100 });
  assert.equal(zoomed.scale, 2);
  assert.equal(zoomed.x + 300 / zoomed.scale, 1200);
  assert.equal(zoomed.y + 100 / zoomed.scale, 400);
  assert.deepEqual(visibleRegion(zoomed, viewport), { top: 350, left: 1050, bottom: 600, right: 1300 });
});

test("the camera never leaves the map", () => {
  const clamped = clampCamera({ x: 5000, y: -7, scale: 2 }, viewport);
  assert.deepEqual(clamped, { x: 1750, y: 0, scale: 2 });
  assert.deepEqual(panCamera(clamped, viewport, -10_000, 10_000), { x: 0, y: 1750, scale: 2 });
  assert.ok(isFullyVisible(zoomCamera(clamped, viewport, 1e-6, { x: 0, y: 0 }), viewport));
});

test("a hidden cell is brought into view", () => {
  const camera = revealCell({ x: 0, y: 0, scale: 2 }, viewport, 1000, 10);
  const region = visibleRegion(camera, viewport);
  assert.ok(region.top <= 1000 && 1000 < region.bottom && region.left === 0);
});

test("the least recently used entry is evicted", () => {
  const cache = new LruCache<number>(2);
  cache.set("a", 1);
  cache.set("b", 2);
  cache.get("a");
  cache.set("c", 3);
  assert.deepEqual([cache.get("a"), cache.get("b"), cache.get("c"), cache.size], [1, undefined, 3, 2]);
});

test("axis ticks are round numbers", () => {
  assert.deepEqual([0.5, 3, 34, 51, 99].map(roundUpTick), [1, 5, 50, 100, 100]);
});

test("arcs are the strongest of the visible rows, outside the claim too", () => {
  const bits = new BitMatrix(new Uint8Array([0b10000000, 0b11000000]), 2, 2);
  const [tile] = new InMemoryMap(2, 2, Uint8Array.of(255, 128, 60, 10), bits).tiles();
  assert.deepEqual(
    strongestArcs([tile], 0.05, 0, 2).map(({ row, column, outside }) => [row, column, outside]),
    [
      [1, 0, false],
      [0, 1, true],
      [0, 0, false],
    ],
  );
  assert.deepEqual(strongestArcs([tile], 0.05, 1, 2).length, 1);
});

test("a large map requests the overview, then the visible tiles, once", async () => {
  const requests: string[] = [];
  const map = new TiledMap(
    { name: "decoder.self", layer: 0, head: 0 },
    600,
    600,
    (async (question: string, params: Record<string, unknown>) => {
      requests.push(question === "tile" ? `tile ${params.row},${params.column}` : question);
      if (question === "overview")
        return {
          rows: 600,
          columns: 600,
          cell_size: 2,
          max_weight: 0.25,
          map_u8: Buffer.alloc(90_000, 255).toString("base64"),
        };
      const rows = Math.min(256, 600 - Number(params.row)),
        columns = Math.min(256, 600 - Number(params.column));
      return {
        row: params.row,
        column: params.column,
        rows,
        columns,
        map_u8: Buffer.alloc(rows * columns, 51).toString("base64"),
        claim_bits: Buffer.alloc(rows * Math.ceil(columns / 8), 255).toString("base64"),
      };
    }) as never,
    new RequestQueue(2),
  );
  const nextChange = () =>
    new Promise<void>((resolve) => {
      const unsubscribe = map.subscribe(() => {
        unsubscribe();
        resolve();
      });
    });
  map.subscribe(() => undefined);
  const region = { top: 300, left: 0, bottom: 310, right: 20 };
  let changed = nextChange();
  assert.deepEqual(map.tiles(region), []);
  await changed;
  changed = nextChange();
  map.tiles(region);
  map.tiles(region);
  await changed;
  assert.deepEqual(requests, ["overview", "tile 256,0"]);
  const value = map.cellValue(300, 5)!;
  assert.ok(Math.abs(value.weight - 0.04) < 1e-9 && value.isExact && value.isAllowed === true);
  assert.deepEqual(map.cellValue(0, 0), { weight: 0.25, isAllowed: null, isExact: false });
});

test("a failed request is not repeated in every frame", async () => {
  let requests = 0;
  const map = new TiledMap(
    { name: "n", layer: 0, head: 0 },
    10,
    10,
    (async () => {
      requests++;
      throw new Error("no such head");
    }) as never,
    new RequestQueue(),
  );
  map.subscribe(() => undefined);
  for (let n = 0; n < 5; n++) {
    map.tiles({ top: 0, left: 0, bottom: 10, right: 10 });
    await new Promise((resolve) => setImmediate(resolve));
  }
  assert.equal(requests, 1);
  assert.equal(map.error(), "no such head");
});
