// Bundle the tests, then run them with Node's test runner.
import { spawnSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const testFolder = dirname(fileURLToPath(import.meta.url));
const outFolder = mkdtempSync(join(tmpdir(), "keepleft-page-"));
try {
  await build({
    absWorkingDir: testFolder,
    entryPoints: readdirSync(testFolder).filter((name) => name.endsWith(".test.ts")),
    outdir: outFolder,
    bundle: true,
    format: "esm",
    platform: "node",
    outExtension: { ".js": ".mjs" },
    jsx: "automatic",
    jsxImportSource: "preact",
    logLevel: "warning",
  });
  const files = readdirSync(outFolder)
    .filter((name) => name.endsWith(".mjs"))
    .map((name) => join(outFolder, name));
  process.exitCode = spawnSync(process.execPath, ["--test", ...files], { stdio: "inherit" }).status ?? 1;
} finally {
  rmSync(outFolder, { recursive: true, force: true });
}
