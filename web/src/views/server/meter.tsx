/** A bar of several parts of a whole: the first is solid, the second hatched. */

interface Props {
  label: string;
  parts: { name: string; value: number }[];
  total: number;
}

export function Meter({ label, parts, total }: Props) {
  const description = parts.map(({ name, value }) => `${name} ${value}`).join(", ");
  return (
    <div class="meter" role="img" aria-label={`${label}: ${description}, of ${total}`}>
      {parts.map(({ name, value }, n) => (
        <span
          key={name}
          class={n === 0 ? "fill" : "fill hatched"}
          style={{ width: `${Math.min(100, (100 * value) / Math.max(1, total))}%` }}
        />
      ))}
    </div>
  );
}
