/** Leaks: does the model keep to what its mask claims, and what would happen if it did not? */

import { usePage } from "../../shell/hooks.ts";
import { Audit } from "./audit.tsx";
import { WithoutMask } from "./unmasked.tsx";

export function LeaksView() {
  const { source, about } = usePage();
  return (
    <>
      {source.can("leaks") && <Audit />}
      {source.can("unmasked") && about.attentions.some(({ kind }) => kind === "masked") && <WithoutMask />}
    </>
  );
}
