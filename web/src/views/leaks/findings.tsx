/** Findings in words, each with a script that shows it. */

import { useRef, useState } from "preact/hooks";
import type { Finding } from "../../api.ts";

const COPIED_MS = 2000;

export function Findings({ findings }: { findings: Finding[] }) {
  if (findings.length === 0) return null;
  return (
    <ul class="findings" aria-label="Findings">
      {findings.map((finding, n) => (
        <li key={n}>
          <p>
            <b>{finding.kind}</b>
            {finding.module && (
              <>
                {" "}
                in <code>{finding.module}</code>
              </>
            )}
            : {finding.message}
          </p>
          <p class="muted">
            {finding.path}
            {finding.also !== undefined && finding.also.length > 0 && ` and ${finding.also.length} more`}
          </p>
          {finding.line && (
            <p class="muted">
              <code>{finding.line}</code>
            </p>
          )}
          {finding.reproduce && (
            <details>
              <summary>Reproduce</summary>
              <Script text={finding.reproduce} />
            </details>
          )}
        </li>
      ))}
    </ul>
  );
}

/** Code with a button that copies it; without access to the clipboard it is selected. */
function Script({ text }: { text: string }) {
  const code = useRef<HTMLPreElement>(null);
  const [label, setLabel] = useState("Copy");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setLabel("Copied");
    } catch {
      if (code.current !== null) getSelection()?.selectAllChildren(code.current);
      setLabel("Selected: press Ctrl+C");
    }
    setTimeout(() => setLabel("Copy"), COPIED_MS);
  };
  return (
    <div class="script">
      <button type="button" class="plain" onClick={() => void copy()}>
        {label}
      </button>
      <pre ref={code}>{text}</pre>
    </div>
  );
}
