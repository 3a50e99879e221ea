/** The leaks view: an audit of the claimed mask, and the model without its causal mask. */

import { useExplorer } from "../../shell/hooks.ts";
import { Audit } from "./audit.tsx";
import { UnmaskedComparison } from "./unmasked.tsx";

export function LeaksView() {
  const { transport, modelInfo } = useExplorer();
  const isCausal = modelInfo.attentions.some(({ kind }) => kind === "masked");
  return (
    <>
      {transport.supports("audit") && <Audit />}
      {transport.supports("unmasked") && isCausal && <UnmaskedComparison />}
    </>
  );
}
