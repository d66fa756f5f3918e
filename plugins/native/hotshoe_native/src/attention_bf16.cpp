#include "attention_worker.h"

template void hs::attend_pages<hs::PagesBF16>(const AttentionArgs&, const Team&);
