// Build the page into the Python package, or into a folder: one script, one style sheet, one HTML file.
import { copyFile, mkdir } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const webFolder = dirname(fileURLToPath(import.meta.url));
const outFolder = process.argv[2]
  ? resolve(process.argv[2])
  : join(webFolder, "../src/keepleft/serving/explorer/page");

await mkdir(outFolder, { recursive: true });
await build({
  absWorkingDir: webFolder,
  entryPoints: { explorer: "src/explorer.ts" },
  outdir: outFolder,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022", "chrome100", "firefox100", "safari15.4"],
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "utf8",
  legalComments: "none",
  logLevel: "warning",
});
await copyFile(join(webFolder, "src/index.html"), join(outFolder, "index.html"));
