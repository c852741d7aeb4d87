/** The processor of the sandboxed worker in wrappers.ts. */
export default async (job: { data: { n: number } }) => {
  if (job.data.n === 0) throw new Error('nothing to halve');
  return { half: job.data.n / 2 };
};
